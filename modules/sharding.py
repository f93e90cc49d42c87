"""Weights that are spread over processes by FSDP2 (`fully_shard`), made whole for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """With all weights whole on every process, whatever runs inside: passes need no communication, so that each process
    may make as many as it likes. All processes enter together. Weights that are whole already stay so.

    Args:
        root: a module that was given to `fully_shard` after the parts of it that were. Behind the block they are as
            `fully_shard` leaves them by default: sharded, and so again after each forward pass, the root's own weights
            only after the backward pass.
    """
    parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
    if not any(isinstance(weight, DTensor) for weight in root.parameters()):
        parts = []
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not root, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)
            part.reshard()


def is_sharded(root: nn.Module) -> bool:
    """Whether `fully_shard` was given a part of it, whose gradients it then collects as its own forward passes say."""
    return any(isinstance(module, FSDPModule) for module in root.modules())


def own_class(module: nn.Module) -> type:
    """The class that a module had before `fully_shard` put one of its own in front."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
