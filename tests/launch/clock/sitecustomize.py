"""On a process's path, this sets its clock off by SKEW_S seconds, as of a host with a wrong one."""

from __future__ import annotations

import datetime
import os
import time

_skew_s = float(os.environ.get("SKEW_S", "0"))
_real_time = time.time


class _Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Skewed:
        return super().now(tz) + datetime.timedelta(seconds=_skew_s)


if _skew_s:
    time.time = lambda: _real_time() + _skew_s
    _Skewed.__module__, _Skewed.__qualname__ = "datetime", "datetime"  # as it is pickled
    datetime.datetime = _Skewed  # type: ignore[misc]
