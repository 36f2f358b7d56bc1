"""What a Ray Train worker runs, in a thread as there, without Ray: how scripts end is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IN_A_THREAD = """
import json, sys, threading
from drivetrain.launch.targets.ray.failures import ScriptFailed
from drivetrain.launch.targets.ray.worker import run_script

def run():
    try:
        outcome.append(run_script(json.loads(sys.argv[1])))
    except ScriptFailed as error:
        outcome.append([error.exit_code, error.step, error.trains, error.text])

outcome = []
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(json.dumps(outcome[0]))
"""


def outcome_of(run_dir: Path, *words: str, **more: Any) -> Any:
    run_dir.mkdir(exist_ok=True)
    config = {"argv": words, "working_dir": str(run_dir.parent), "run_dir": str(run_dir), **more}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, json.dumps(config)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    return json.loads(done.stdout.splitlines()[-1])


def script(folder: Path, text: str) -> str:
    (folder / "beside.py").write_text("VALUE = 3\n")
    (folder / "train.py").write_text(text)
    return "train.py"


def test_changes_that_are_accepted_reach_the_contract(tmp_path: Path) -> None:
    told = "from drivetrain.train import contract\nassert contract.accepted_changes() == "
    changes, text = ["seed", "a.b"], f"{told}{{'seed', 'a.b'}}"
    assert outcome_of(tmp_path / "run", script(tmp_path, text), accepted_changes=changes) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import sys, beside; assert sys.argv[1:] == ['a'], sys.argv; sys.exit(0)", None),
        ("import sys; sys.exit(7)", [7, 0, False, "the script ended with exit code 7"]),
    ],
)
def test_how_a_script_ends_is_told(text: str, expected: Any, tmp_path: Path) -> None:
    assert outcome_of(tmp_path / "run", script(tmp_path, text), "a") == expected


def test_a_mistake_of_the_users_has_its_code_and_no_frames(tmp_path: Path) -> None:
    text = "from drivetrain import load_config; load_config()"
    code, *_, said = outcome_of(tmp_path / "run", script(tmp_path, text), "max_stepz=1")
    assert code == 2
    assert said.startswith("max_stepz")
    assert "did you mean max_steps?" in said


def test_an_error_comes_with_the_scripts_own_frames(tmp_path: Path) -> None:
    code, step, trains, text = outcome_of(
        tmp_path / "run", script(tmp_path, "def f():\n    raise ValueError('Oh')\nf()\n")
    )
    assert (code, step, trains) == (1, 0, False)
    assert text.rstrip().endswith("ValueError: Oh")
    assert "runpy" not in text


@pytest.mark.slow
def test_a_file_stops_the_run_which_has_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").touch()
    workload = ("-m", "drivetrain.verify.drills.workload", "max_steps=100000")
    assert outcome_of(run, *workload) == "stopped"
    assert list((run / "checkpoints").glob("step-*/manifest.json"))
    # once the wish is gone, the same words go on
    (run / "stop").unlink()
    assert outcome_of(run, *workload[:2], "max_steps=1") is None
