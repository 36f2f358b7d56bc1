"""Simulates a wrong clock in this process and those it forks."""

from __future__ import annotations

import datetime
import os
import sys
import time

SKEW_S = "DRIVETRAIN_DRILL_SKEW_S"


def skew_as_told() -> None:
    """Shift the wall clock by the drill's seconds; the monotonic clock is unchanged."""
    skew_s = float(os.environ.get(SKEW_S) or 0.0)
    if not skew_s or getattr(time.time, "is_skewed", False):
        return
    real_time, real = time.time, datetime.datetime

    class Skewed(real):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return super().now(tz) + datetime.timedelta(seconds=skew_s)  # type: ignore[no-any-return]

    def skewed_time() -> float:
        return real_time() + skew_s

    skewed_time.is_skewed = True  # type: ignore[attr-defined]
    Skewed.__module__, Skewed.__qualname__ = "datetime", "datetime"  # so that it can be pickled
    time.time = skewed_time
    datetime.datetime = Skewed  # type: ignore[misc]
    for module in list(sys.modules.values()):  # torch's rendezvous imports the class itself
        if getattr(module, "__dict__", {}).get("datetime") is real:
            module.datetime = Skewed  # type: ignore[attr-defined]
