"""Runs that an earlier version wrote: each can be read, verified and resumed.

`tests/golden/runs/<version>` is a run directory of that version, by `tests/scripts/earlier_run.py`.
A new one is added before the format changes; none is ever written anew.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.record.reading import open_run

TESTS = Path(__file__).parents[1]
EARLIER = sorted((TESTS / "golden" / "runs").iterdir())
SETTINGS = ("global_batch_size=8", "checkpoint.every_steps=2", "record.sinks=[]")


def command(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "drivetrain", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("earlier", EARLIER, ids=lambda path: path.name)
def test_a_run_of_an_earlier_version_is_read_verified_and_resumed(
    earlier: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(earlier, run)
    assert "good" in command("checkpoint", "verify", str(run))
    assert "step 4" in command("status", str(run))
    command("report", str(run), "--output", str(tmp_path / "report.html"))
    script = str(TESTS / "scripts" / "earlier_run.py")
    printed = command("train", "--run-dir", str(run), script, *SETTINGS, "max_steps=6")
    assert "resumed: after step 4" in printed
    assert open_run(run).scalars()["train/loss"].steps.tolist() == [2, 4, 6]
