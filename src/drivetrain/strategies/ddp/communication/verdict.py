"""When a trial has seen enough. Pure: ranks that have the same figures decide alike.

A round is one step with plain gradients and one with the candidate. On a slow link each plain step
is dear, so the first round is enough when it bears out what the wire has promised: two measurements
of different kinds that a hiccup would have to strike alike. Otherwise rounds go on until every step
of the one way is well below every step of the other, and after the last round medians decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MOST_ROUNDS = 5
WORTH_KEEPING = 0.95
"""Of a whole step; steps differ by themselves, and in doubt gradients stay plain."""
_CLEARLY = 0.75
_BORNE_OUT = (0.5, 1.5)
"""So much of the promised time is saved. Less: backward hides it. More: something else was slow."""


def pays(plain: Sequence[float], candidate: Sequence[float], promised_s: float) -> bool | None:
    """Whether the candidate's steps are worth it; None: one more round will tell."""
    plain_s, candidate_s = median(plain), median(candidate)
    if len(plain) == 1:
        least, most = (share * promised_s for share in _BORNE_OUT)
        is_borne_out = least <= plain_s - candidate_s <= most
        return True if is_borne_out and candidate_s < _CLEARLY * plain_s else None
    if max(candidate) < _CLEARLY * min(plain):
        return True
    if max(plain) < _CLEARLY * min(candidate):
        return False
    if len(plain) < MOST_ROUNDS:
        return None
    return candidate_s < WORTH_KEEPING * plain_s
