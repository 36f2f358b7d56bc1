"""Names that have changed: the old one works for a while, and says what to write instead."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Renamed:
    """Where an old name leads."""

    new: str
    removed_in: str
    """The version that will no longer know the old name."""


CONFIG_KEYS: dict[str, Renamed] = {}
"""Old keys of the config."""

PUBLIC_NAMES: dict[str, Renamed] = {}
"""Names that were in `drivetrain.__all__`."""


def warn_renamed(old: str, renamed: Renamed) -> None:
    """A FutureWarning: users see those without asking, once per process."""
    message = f"{old} is now {renamed.new}; {renamed.removed_in} will not know the old name"
    warnings.warn(message, FutureWarning, stacklevel=3)
