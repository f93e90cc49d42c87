"""Where trained warm starts are kept, by the content of everything that they depend on."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .policy import Policy

log = logging.getLogger(__name__)

FORMAT = 1  # raised whenever the training itself changes
Curve = list[dict[str, float]]  # what was logged at each step


class WarmStartCache:
    """One file with the weights after a warm start, and what it logged.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, policy: Policy, demonstrations: Any, options: dict[str, Any]) -> "WarmStartCache":
        """The file for a policy (initial weights and tokenizer), demonstrations (as token ids) and options."""
        content = json.dumps([FORMAT, policy.content_hash(), demonstrations, options], sort_keys=True)
        return cls(folder() / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.safetensors")

    def load(self, policy: Policy) -> Curve | None:
        """Put the weights into the policy; None, and nothing changed, where there are none or the file is damaged."""
        if not self.path.exists():
            return None
        weights = dict(policy.model.named_parameters())
        try:
            with safe_open(self.path, framework="pt") as file:
                curve = json.loads(file.metadata()["curve"])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in weights.items()}:
                raise SafetensorError("other weights than the policy's")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the cached warm start %s is damaged (%s): training it again", self.path, error)
            return None
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(found[name])
        return curve

    def save(self, policy: Policy, curve: Curve) -> None:
        """Write the file under another name first, so that it is never half-written. A folder that cannot be written
        to costs the cache only: it is warned about."""
        weights = {name: weight.detach().cpu().contiguous() for name, weight in policy.model.named_parameters()}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(weights, part, metadata={"curve": json.dumps(curve)})
            part.replace(self.path)
        except (OSError, SafetensorError) as error:
            if part.is_file():
                part.unlink()
            log.warning("the warm start could not be kept in %s (%s): the next run trains it again", self.path, error)


def folder() -> Path:
    root = os.environ.get("APPORTION_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "apportion") / "warm_start"
