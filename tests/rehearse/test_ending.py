"""A rehearsal that is ended leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = """
import time
from collections.abc import Callable
from pathlib import Path
(Path(__file__).parent / "begun").touch()
time.sleep(600)
"""


def _alive(script: Path) -> list[int]:
    """Processes that have the script's folder for their own: all of a rehearsal's have."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(each / "cwd") == str(script.parent):
                found.append(int(each.name))
        except OSError:
            continue
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=[pytest.mark.slow, pytest.mark.long]), signal.SIGKILL],
)
def test_none_is_left(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    words = [sys.executable, "-m", "drivetrain", "rehearse", str(script), "--world-size", "4"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        _wait_until((tmp_path / "begun").exists, 60)
        process.send_signal(number)
    _wait_until(lambda: not _alive(script), 20)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.1)
