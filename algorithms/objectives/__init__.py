"""Policy objectives: what an advantage is put into, one file a method."""

from .base import ObjectiveOutput, PolicyObjective
from .clipped import Clipped
from .reinforce import Reinforce

__all__ = ["Clipped", "ObjectiveOutput", "PolicyObjective", "Reinforce"]
