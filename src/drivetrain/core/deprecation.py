"""Renamed config keys and public names: an old name works for a while, with a warning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Renamed:
    """The new name for an old one."""

    new: str
    removed_in: str
    """The version that removes the old name."""


CONFIG_KEYS: dict[str, Renamed] = {}
"""Old config keys."""

PUBLIC_NAMES: dict[str, Renamed] = {}
"""Names that used to be in `drivetrain.__all__`."""


def warn_renamed(old: str, renamed: Renamed) -> None:
    """Issue a FutureWarning, which Python shows to users by default, once per process."""
    message = f"{old} is now {renamed.new}; {renamed.removed_in} removes the old name"
    warnings.warn(message, FutureWarning, stacklevel=3)
