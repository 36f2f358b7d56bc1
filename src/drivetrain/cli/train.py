"""`drivetrain train`."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.launch.local import launch


def run(words: Sequence[str]) -> int:
    """Start the ranks; the exit code."""
    return launch(words)
