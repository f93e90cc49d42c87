"""Sampling engines."""

from .generate import GenerateSampler
from .shared_prefix import SharedPrefixSampler

__all__ = ["GenerateSampler", "SharedPrefixSampler"]
