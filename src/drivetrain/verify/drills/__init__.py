"""Fault drills: break a run on purpose, and check that it ends as if nothing had happened."""

from drivetrain.verify.drills.faults import Fault, Faults

__all__ = ["Fault", "Faults"]
