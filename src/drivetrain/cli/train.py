"""`drivetrain train`."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.launch.guardian import guard


def run(words: Sequence[str]) -> int:
    """Start the ranks and keep them going; the exit code."""
    return guard(words)
