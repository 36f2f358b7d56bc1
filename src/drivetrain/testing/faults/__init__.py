"""Fault drills: break a run on purpose, and see that it ends as if nothing had happened."""

from drivetrain.testing.faults.script import Fault, Faults

__all__ = ["Fault", "Faults"]
