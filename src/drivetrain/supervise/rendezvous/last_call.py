"""The last call of a round: once enough nodes are there, how long others may still join.

torch writes it down as a time of day, by the clock of whoever was the one too many to wait for, and
holds it against the clock of whoever reads it. Here each node counts from when it first saw that
time, by its own clock, and torch is shown one that is long past or far off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

_PAST, _FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


class LastCall:
    """`lasts_s`: how long one is."""

    def __init__(self, lasts_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lasts_s = lasts_s
        self._clock = clock
        self._written: datetime | None = None
        self._over_s = 0.0

    def as_seen(self, deadline: datetime | None) -> datetime | None:
        """What torch's rules are shown, of what is written or was shown before."""
        if deadline is None:
            self._written = None
            return None
        if deadline not in (_PAST, _FUTURE, self._written):
            self._written, self._over_s = deadline, self._clock() + self._lasts_s
        return _PAST if self._clock() >= self._over_s else _FUTURE

    def as_written(self, deadline: datetime | None) -> datetime | None:
        """What the other nodes are to see: a new one, or the one there was."""
        return self._written if deadline in (_PAST, _FUTURE) else deadline
