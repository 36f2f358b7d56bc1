"""Which of the config's optimizer keys the script itself has read, and so may use.

A script may compute its optimizer's settings from the config (`lr = config.learning_rate * 8`).
Nothing can follow the value from there, but that it was read can be seen. Kept for the process,
because values outlive configs.
"""

from __future__ import annotations

import sys

OPTIMIZER_KEYS = (
    "optimizer",
    "learning_rate",
    "weight_decay",
    "momentum",
    "decay_norms_and_biases",
    "adamw_implementation",
    "muon_dtype",
)
"""The keys of `optimization` that only make the config's own optimizer; the others apply to any."""

_OURS = ("drivetrain", "pydantic", "copy", "copyreg")
WHOLE_CONFIG = "everything"
"""Stands for a copy of all values."""
_read: set[str] = set()


def note_read(*keys: str) -> None:
    """Record keys as read, if the code that called the caller of this is the script's.

    To be called by a section's `__getattribute__` or method.
    """
    module = sys._getframe(2).f_globals.get("__name__", "")  # noqa: SLF001  # as logging does
    if module.partition(".")[0] not in _OURS:
        _read.update(keys)


def read_by_script() -> frozenset[str]:
    """Return the keys that the script has read, each by itself or with their section."""
    return frozenset(_read - {WHOLE_CONFIG})


def may_use_anything() -> bool:
    """True if the script has copied the whole config, if only to log it."""
    return WHOLE_CONFIG in _read
