"""Hints: the word that was probably meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_NONE: Mapping[str, str] = {}


def nearest(
    said: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NONE, cutoff: float = 0.6
) -> str | None:
    """Of the known words the nearest in spelling, whatever its capital letters.

    Args:
        said: What was written.
        known: What could have been.
        elsewhere: What other tools call something, in small letters, and what it is called here:
            first, because spelling would lead from their words to wrong ones.
        cutoff: How alike two words must be, as difflib has it.
    """
    word = said.lower()
    if word in elsewhere:
        return elsewhere[word]
    spelled = {each.lower(): each for each in reversed(list(known))}
    found = difflib.get_close_matches(word, spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None
