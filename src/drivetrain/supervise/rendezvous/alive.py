"""Who is alive, as one node sees it: whose sign of life has changed, by this node's own clock.

What a sign says is never read as a time. The clocks of two machines may differ by minutes; whether
something has changed since the last look is the same on all of them. The price: who looks for the
first time must look for as long as the dead are given before they are believed to be dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Seen:
    sign: object
    changed_s: float
    looked_s: float


class Alive(Generic[Key]):
    """`read` gives somebody's sign of life; it is asked no more often than every `look_s`."""

    def __init__(
        self,
        read: Callable[[Key], object],
        patience_s: float,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._patience_s = patience_s
        self._look_s = look_s
        self._clock = clock
        self._seen: dict[Key, _Seen] = {}

    def is_dead(self, who: Key) -> bool:
        """Whether the sign has not changed for too long; who is seen first is alive.

        The first sign is read at the second look: where thousands come at once, nobody need read.
        """
        now_s = self._clock()
        seen = self._seen.setdefault(who, _Seen(None, now_s, now_s))
        if now_s - seen.looked_s >= self._look_s:
            seen.looked_s = now_s
            sign = self._read(who)
            if sign != seen.sign:
                seen.sign, seen.changed_s = sign, now_s
        return now_s - seen.changed_s > self._patience_s
