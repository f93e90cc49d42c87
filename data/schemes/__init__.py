"""Rollout schemes: how prompts become rollouts."""

from .base import RolloutRequest, RolloutScheme
from .direct import Direct

__all__ = ["Direct", "RolloutRequest", "RolloutScheme"]
