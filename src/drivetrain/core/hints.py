"""Hints: the known name that an unknown one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_NONE: Mapping[str, str] = {}


def nearest(
    said: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NONE, cutoff: float = 0.6
) -> str | None:
    """Return the known word that is closest in spelling, ignoring case, or None.

    Args:
        said: The unknown word.
        known: The known words.
        elsewhere: Other tools' names, in lower case, and Drivetrain's names for the same. Looked up
            first, because similar spelling would lead to wrong names.
        cutoff: Minimum similarity, as in difflib.
    """
    word = said.lower()
    if word in elsewhere:
        return elsewhere[word]
    spelled = {each.lower(): each for each in reversed(list(known))}
    found = difflib.get_close_matches(word, spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None
