"""TensorFlow for real: one worker, and two of which one is killed. `make tensorflow` runs this."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain.record.ledger import ledger_of
from drivetrain.record.reading import open_run
from drivetrain.record.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="`make tensorflow` installs it"),
]
SCRIPT = Path(__file__).with_name("train.py")
TOLERANCE = 1e-5
"""Relative. Two workers add in another order than one, and Adam divides by small numbers."""


def train(folder: Path, *argv: str, workers: int = 1, kill_step: int = 0) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, *argv, str(SCRIPT), "found.json", str(kill_step)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{workers} workers\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return {**found, "said": done.stdout + done.stderr}


def test_two_workers_one_killed_end_with_one_workers_loss(tmp_path: Path) -> None:
    one = train(tmp_path / "one")
    assert one["strategy"] == "MirroredStrategy"
    argv = ["-m", "drivetrain", "train", "--backend", "tensorflow", "--nproc-per-node", "2"]
    two = train(tmp_path / "two", *argv, workers=2, kill_step=14)
    assert two["strategy"] == "CollectiveAllReduceStrategy"  # MultiWorkerMirroredStrategy's own
    assert "signal 9" in two["said"] or "SIGKILL" in two["said"]
    assert two["epochs"] == [3, 4, 5]  # it died in the fourth epoch of four steps each
    assert two["losses"] == pytest.approx(one["losses"][3:], rel=TOLERANCE)
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=TOLERANCE)
    assert len(RunDirectory(Path(two["run_dir"])).attempts()) == 2
    assert ledger_of(open_run(two["run_dir"])).seconds["productive"] > 0
