"""Who am I: rank, world and meeting point, read from whatever started this process."""

from drivetrain.cluster.environments import detect
from drivetrain.cluster.identity import Identity

__all__ = ["Identity", "detect"]
