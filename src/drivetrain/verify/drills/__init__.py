"""Fault drills: break a run on purpose, and see that it ends as if nothing had happened."""

from drivetrain.verify.drills.faults import Fault, Faults

__all__ = ["Fault", "Faults"]
