"""Tools for testing code that runs on several ranks; shipped, so users can test their own."""

from drivetrain.testing.ranks import run_ranks

__all__ = ["run_ranks"]
