"""What a checkpoint holds beside weights and optimizer, and the refusal of one that belongs to something else."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.errors import UsageError

KEY = "apportion"
FOREIGN = "was not written by a fit of apportion: give a .ckpt file from runs/…/checkpoints"


def check_file(path: str | Path) -> None:
    """Raise a UsageError unless the file is a whole checkpoint of apportion's. Reads the names in it, no weights."""
    if not Path(path).is_file():
        raise UsageError(f"ckpt_path is '{path}', a file that does not exist: give a .ckpt file, 'last' or 'best'")
    if not zipfile.is_zipfile(path):
        raise UsageError(f"ckpt_path is '{path}', which is no checkpoint, or half of one: give another .ckpt file")
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        raise UsageError(f"ckpt_path is '{path}', which {FOREIGN}") from error
    if not isinstance(found, dict) or KEY not in found:
        raise UsageError(f"ckpt_path is '{path}', which {FOREIGN}")


def saved_state(checkpoint: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    """The module's own entries in a checkpoint whose weights fit those of `weights` by name and shape.

    Raises:
        UsageError: it was not written by apportion, or it is of another model.
    """
    found = checkpoint.get("state_dict")
    if KEY not in checkpoint or not isinstance(found, dict):
        raise UsageError(f"the checkpoint {FOREIGN}")
    for name in [*weights, *found]:
        here, there = (tuple(w[name].shape) if name in w else None for w in (weights, found))
        if here != there:
            described = [f"of shape {list(shape)}" if shape is not None else "missing" for shape in (there, here)]
            raise UsageError(
                f"the checkpoint is of another model: {name} is {described[0]} in the checkpoint and {described[1]} in "
                "the configured model: give the model.policy (and model.kl) that it was trained with"
            )
    return checkpoint[KEY]
