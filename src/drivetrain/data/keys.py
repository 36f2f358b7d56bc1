"""Random streams keyed by what is being done, never by who does it.

`fold(seed, …)` turns a key such as (seed, step, micro-batch index) into a 63-bit seed. The same key
gives the same stream on any rank of any world; different keys give unrelated streams.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# What a stream is for; part of every key, so that no two purposes share one.
INIT, MODEL, DATA, SAMPLER = 1, 2, 3, 4


def fold(*key: int) -> int:
    """Mix the key's numbers, in order, into one seed."""
    state = 0
    for number in key:
        state = _mix(state + number + _GOLDEN)
    return state >> 1


def turn_seed(stream: int, step: int, index: int) -> int:
    """The seed of one micro-batch in a stream `fold(seed, purpose)`: once per turn, so in one mix.

    Step and index go into separate bits: no two turns of a run share a seed. Idle turns are -1.
    """
    return _mix(stream + _GOLDEN * (step << 20 | index + 1)) >> 1


def _mix(state: int) -> int:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output."""
    state &= _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)
