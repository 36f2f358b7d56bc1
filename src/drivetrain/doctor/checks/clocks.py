"""Clocks: meeting by heartbeat, tokens and logs all compare times of different hosts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drivetrain.core.finding import Finding
from drivetrain.doctor.facts import Examination

# Logs of two hosts can no longer be read side by side; and: nodes that meet in a folder judge by
# the others' time stamps who is alive, for three intervals of five seconds.
_NOTICEABLE_S, _HARMFUL_S = 0.5, 5.0


def check(examination: Examination) -> Iterator[Finding]:
    """Against the middle clock: with two hosts nobody knows which is wrong, with more one does."""
    if len(examination.clocks) < 2:
        return
    offsets = sorted(clock.offset_s for clock in examination.clocks)
    middle = median(offsets) if len(offsets) > 2 else offsets[0]
    for clock in examination.clocks:
        skew_s = clock.offset_s - middle
        surely_s = abs(skew_s) - 2 * clock.uncertainty_s
        if surely_s < _NOTICEABLE_S:
            continue
        yield Finding(
            "clock",
            "error" if surely_s > _HARMFUL_S else "warning",
            (clock.host,),
            f"its clock is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}:"
            " heartbeats look old or come from the future",
            f"offset {clock.offset_s:+.2f} s to the client's, ± {clock.uncertainty_s:.2f} s;"
            f" the others' {middle:+.2f} s",
            f"start chronyd or systemd-timesyncd on {clock.host}; `chronyc makestep` sets it now",
        )
