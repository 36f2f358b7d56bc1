"""A script without Drivetrain in it that waits for itself is ended with a verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_two_sends_that_wait_for_each_other_are_named() -> None:
    flags = ["--nproc-per-node=2", "--stall-timeout=3"]
    command = [sys.executable, "-m", "drivetrain", "train", *flags, "point_to_point.py", "deadlock"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=EXAMPLES, check=False
    )
    assert ended.returncode == 1
    assert "no rank has computed anything for" in ended.stderr
    assert (
        "every rank waits for another: ranks 0 and 1 in send at point_to_point.py:" in ended.stderr
    )
    assert "restarting" not in ended.stderr
