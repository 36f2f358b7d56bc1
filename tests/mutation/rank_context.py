"""Imported once by the server that ranks are forked from: their lines are counted for their test.

The server began in the test that needed it first. A rank takes on the variables of the test that
starts it, and with them, here, its name.
"""

from __future__ import annotations

import os

import coverage

from drivetrain.testing import ranks
from tests.mutation.reach import TEST

_take_on = ranks._take_on


def _take_on_with_context(variables: dict[str, str]) -> None:
    _take_on(variables)
    running = coverage.Coverage.current()
    if running is not None:
        running.switch_context(os.environ[TEST])


ranks._take_on = _take_on_with_context
