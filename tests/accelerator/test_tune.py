"""Trials of a study side by side on one machine: each has devices of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.launch.job import Job
from drivetrain.launch.submission import Submission
from drivetrain.launch.targets.local import Local
from drivetrain.tune.places import places_for

ROOT = Path(__file__).parents[2]
VARIABLE = "SIM_VISIBLE_DEVICES"


def job(ranks: int) -> Job:
    return Job("study", "train.py", (), (), "/run", "/", processes_per_node=ranks)


def test_no_two_trials_have_a_device_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    places, running = places_for(Local(), job(3), 2), list[Submission]()  # of the 8 devices
    for expected in ("0,1,2", "3,4,5"):
        place = places.free(running)
        assert place is not None
        target, placed = places.placed(place, Local(), job(3))
        assert dict(placed.environment) == {VARIABLE: expected}
        running.append(Submission(target, placed, "here:1", ""))
    assert places.free(running) is None
    assert places.free(running[1:]) == ("0", "1", "2"), "the first has ended"
    alone = Submission(Local(), job(3), "here:1", "")
    assert places.free([alone]) == ("3", "4", "5"), "it was started alone, on the first devices"


def test_a_driver_that_sees_some_devices_hands_out_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ",".join("76543210"))
    assert places_for(Local(), job(2), 2).free([]) == ("7", "6")


def test_more_trials_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="trials of 3 each do not fit on the 8 devices") as told:
        places_for(Local(), job(3), 3)
    assert "--parallel-trials 2" in str(told.value)
    assert places_for(Local(), job(9), 1).free([]) == (), "one alone may share them out"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_study_whose_trials_run_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {optimization.learning_rate: [0.3, 0.03]}")
    words = ["tune", str(ROOT / "tests/scripts/tuned.py"), "--space", str(space), "--trials", "2"]
    words += [
        "--parallel-trials",
        "2",
        "--nproc-per-trial",
        "2",
        "--study",
        str(tmp_path / "study"),
    ]
    command = [sys.executable, "-m", "drivetrain", *words, "--sampler", "random"]
    env = {**os.environ, "TUNED_SLEEP_S": "0.1"}
    subprocess.run(command, check=True, timeout=500, env=env)
    trials = [tmp_path / f"study/trials/{trial:05d}" for trial in range(2)]
    jobs = [json.loads((trial / "job.json").read_text())["job"] for trial in trials]
    assert [each["environment"] for each in jobs] == [[[VARIABLE, "0,1"]], [[VARIABLE, "2,3"]]]
    starts = [json.loads((trial / "attempts/0001/start.json").read_text()) for trial in trials]
    names = [each["device_name"] for each in starts]
    assert names == ["Simulated accelerator 0", "Simulated accelerator 2"]
