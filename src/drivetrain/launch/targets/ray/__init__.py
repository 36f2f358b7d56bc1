"""Ray: a Ray Train driver one could have written by hand, handed over by Ray's Jobs API."""

from drivetrain.launch.targets.ray.target import Ray

__all__ = ["Ray"]
