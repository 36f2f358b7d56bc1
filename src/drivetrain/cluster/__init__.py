"""Who am I: rank, world and rendezvous endpoint, read from whatever started this process."""

from drivetrain.cluster.environments import Identity, detect

__all__ = ["Identity", "detect"]
