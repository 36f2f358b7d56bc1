"""Forks of real runs: equal to the bit, kept from retention, and whole after any kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing import run_ranks
from drivetrain.tune.journal import read_journal
from tests.tune.forks import facts, killed_forks, many_forks
from tests.tune.test_study import command, lock_holder, tune, wait_until, winner_of


@pytest.mark.slow
def test_forks_on_two_ranks_begin_as_their_donors_went_on(tmp_path: Path) -> None:
    for forks in run_ranks(many_forks, 2, 300, args=(str(tmp_path), 2)):
        assert len(forks) == 4
        for each in forks:
            assert each["changed"]
            assert each["same"] == ["weights", "gradients' signs", "optimizer", "random state"]
            assert each["pins left"] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills_during_forks(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = killed_forks(tmp_path, 20)
    assert found["kills"] == 20
    assert found["same trials, forks and values"]
    assert (found["forks"], found["pins left"]) == (6, [])
    where = " ".join(found["where"])
    for part in ("journal.write", "pins.pin", "pins.release"):
        assert part in where


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_forks_on_two_ranks(tmp_path: Path) -> None:
    for forks in run_ranks(many_forks, 2, 3000, args=(str(tmp_path), 25)):
        assert len(forks) == 50
        for each in forks:
            assert each["same"][:4] == ["weights", "gradients' signs", "optimizer", "random state"]
            assert each["pins left"] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_population_of_real_trials_killed_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks each: calm on one worker; on two with a fork and the driver killed; verified."""
    pytest.importorskip("optuna")
    flags = ("--population", "2", "--quantile", "0.5", "--rungs", "4", "--nproc-per-trial", "2")
    space = "parameters: {optimization.learning_rate: {low: 1e-3, high: 3e-1, log: true}}"
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    done = tune(calm, *flags, space=space)
    assert done.returncode == 0, done.stderr
    assert "└─ 2  from step 4: learning_rate" in done.stdout

    monkeypatch.setenv("TUNED_SLEEP_S", "0.3")
    words = command(rough, *flags, "--parallel-trials", "2", space=space)
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = rough / "trials/00002"
    wait_until((child / "conductor.lock").exists, 600)
    wait_until(lambda: (child / "conductor.lock").read_text().split()[1:], 60)
    os.kill(lock_holder(child / "conductor.lock"), signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert len(list(rough.glob("trials/*/checkpoints/pin-*"))) == 1
    done = tune(rough, *flags, "--parallel-trials", "2", space=space)
    assert done.returncode == 0, done.stderr
    assert facts(calm) == facts(rough)
    assert winner_of(calm) == winner_of(rough)
    assert list(rough.glob("trials/*/checkpoints/pin-*")) == []

    verify = [sys.executable, "-m", "drivetrain", "tune", "verify", str(rough), "--trial", "2"]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: " in done.stdout
    journal = rough / "journal.jsonl"  # a study that says something else of its fork
    value = str(read_journal(rough).asked[2].values["optimization.learning_rate"])
    journal.write_text(journal.read_text().replace(value, "0.2"))
    done = subprocess.run(verify, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not equal; the replay is kept in" in done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_line_whose_values_pb2_chose_is_replayed_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    flags = ("--population", "2", "--quantile", "0.5", "--rungs", "4", "--explore", "pb2")
    space = "parameters: {optimization.learning_rate: {low: 1e-3, high: 3e-1, log: true}}"
    studies = [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(studies, 1):
        done = tune(path, *flags, "--parallel-trials", str(number), space=space)
        assert done.returncode == 0, done.stderr
    assert facts(studies[0]) == facts(studies[1])
    verify = [sys.executable, "-m", "drivetrain", "tune", "verify", str(studies[1]), "--trial", "2"]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: " in done.stdout
