"""`drivetrain train`."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.launch.request import read_request


def run(words: Sequence[str]) -> int:
    """Start the ranks and keep them going, or hand the run to a target; the exit code."""
    request = read_request(words)
    if request is not None:
        from drivetrain.cli.jobs import submit

        return submit(request)
    from drivetrain.launch.guardian import guard

    return guard(words)
