"""A trial as a Kubernetes object: submitted, looked at, its value read from the volume."""

from __future__ import annotations

import json
from pathlib import Path

from drivetrain.launch import submission
from drivetrain.launch.job import Job
from drivetrain.launch.target import State
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked
from drivetrain.tune.settings import Settings, Study
from drivetrain.tune.space import Choice, Space
from drivetrain.tune.trial_run import Runner
from tests.kubernetes.jobs import CPU_TARGET, changed
from tests.kubernetes.stand_in import StandIn


def test_a_trial_is_submitted_and_its_value_read(server: StandIn, job: Job, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    settings = Settings(job.script, ("max_steps=8",), num_trials=2, rungs=(4,))
    study = Study(tmp_path / "study", settings, Space({"seed": Choice((1, 2))}))
    runner = Runner(study, changed(CPU_TARGET, mount_path=str(volume)), job)
    asked = Asked(1, {"seed": 2})
    assert runner.status(asked, 0) is None
    runner.start(asked, 0, ())
    waiting = runner.status(asked, 0)
    assert waiting is not None
    assert waiting.state is State.WAITING
    assert runner.status(asked, 1) is None, "that is another job"

    made = submission.load(study.run_dir(1))
    folder = runner.record(1)
    assert folder.parent == volume
    assert made.job.run_dir == str(study.run_dir(1).absolute())
    (folder / "events").mkdir(parents=True)
    line = {"kind": "scalars", "step": 4, "time_s": 1.0, "values": {"val/loss": 0.25}}
    (folder / "events/00000.jsonl").write_text(f"{json.dumps(line)}\n")
    path = server.path_of("jobs")
    assert path.rpartition("/")[2].startswith(f"{job.name}-1-")
    server.objects[path]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    finished = runner.status(asked, 0)
    assert finished is not None
    end = runner.result(Work(1, 0), finished, 0)
    assert end is not None
    assert (end.outcome, end.step, end.value) == ("done", 4, 0.25)
