"""Random streams keyed by what is being done, never by who does it.

`fold(seed, …)` turns a key such as (seed, step, micro-batch index) into a 63-bit seed. The same key
gives the same stream on any rank of any world; different keys give unrelated streams.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# What a stream is for; part of every key, so that no two purposes share one.
INIT, MODEL, DATA = 1, 2, 3


def fold(*key: int) -> int:
    """Mix the key's numbers, in order, into one seed (the splitmix64 finaliser, chained).

    What stays the same can be folded once: `fold(fold(seed, MODEL), step, index)`.
    """
    state = 0
    for number in key:
        state = (state + number + _GOLDEN) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1
