"""Sampling engines."""

from .generate import GenerateSampler

__all__ = ["GenerateSampler"]
