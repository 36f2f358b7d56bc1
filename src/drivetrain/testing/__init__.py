"""Tools to test code that runs on several ranks. Shipped, so that users can test their own."""

from drivetrain.testing.ranks import run_ranks

__all__ = ["run_ranks"]
