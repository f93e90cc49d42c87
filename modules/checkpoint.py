"""What a checkpoint holds beside weights and optimizer, and the refusal of one that belongs to something else."""

from typing import Any

from torch import Tensor

from ..data.errors import UsageError

KEY = "apportion"


def saved_state(checkpoint: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """The module's own entries in a checkpoint whose weights fit those of `weights` by name and shape.

    Raises:
        UsageError: it was not written by apportion, or it is of another model.
    """
    found = checkpoint.get("state_dict")
    if KEY not in checkpoint or not isinstance(found, dict):
        raise UsageError("the checkpoint was not written by a fit of apportion: give one from runs/…/checkpoints")
    for name in [*weights, *found]:
        here, there = (tuple(w[name].shape) if name in w else None for w in (weights, found))
        if here != there:
            described = [f"of shape {list(shape)}" if shape is not None else "missing" for shape in (there, here)]
            raise UsageError(
                f"the checkpoint is of another model: {name} is {described[0]} in the checkpoint and {described[1]} in "
                "the configured model: give the model.policy (and model.kl) that it was trained with"
            )
    return checkpoint[KEY]
