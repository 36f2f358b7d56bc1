"""Random streams keyed by what they are for, never by the rank that uses them.

`fold(seed, …)` turns a key such as (seed, step, micro-batch index) into a 63-bit seed. The same key
gives the same stream on any rank at any world size; different keys give unrelated streams.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# The purpose of a stream; part of every key, so that no two purposes share a stream.
INIT, MODEL, DATA, SAMPLER, SCRIPT = 1, 2, 3, 4, 5


def fold(*key: int) -> int:
    """Mix the key's numbers, in order, into one seed."""
    state = 0
    for number in key:
        state = _mix(state + number + _GOLDEN)
    return state >> 1


def turn_seed(stream: int, step: int, index: int) -> int:
    """Return the seed of one micro-batch in a stream `fold(seed, purpose)`.

    It runs once per turn, so it mixes only once. Step and index use separate bits, so no two turns
    of a run share a seed. Idle turns have index -1.
    """
    return _mix(stream + _GOLDEN * (step << 20 | index + 1)) >> 1


def _mix(state: int) -> int:
    """The finaliser of splitmix64: every bit of the input affects every bit of the output."""
    state &= _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)
