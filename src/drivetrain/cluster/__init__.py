"""This process's identity: rank, world size and rendezvous endpoint, as set by its launcher."""

from drivetrain.cluster.environments import Identity, detect

__all__ = ["Identity", "detect"]
