"""Runs whose supervisor and ranks are forked from a process that has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import Preempted
from drivetrain.launch import template
from drivetrain.record.reading import open_run

ROOT = Path(__file__).parents[2]
RUNS = ("forked", "cold")
SCRIPT = str(ROOT / "tests/scripts/tuned.py")


def until(is_so: Callable[[], object], what: str, most_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def is_kept() -> Iterator[Path]:
    """Its socket, once it answers."""
    with template.kept(SCRIPT):
        path = Path(os.environ[template.VARIABLE])
        until(path.exists, "the template answers")
        yield path


def start(run: Path, *words: str, sleep_s: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node=2"]
    command += [f"--run-dir={run}", SCRIPT, *words]
    environment = {**os.environ, "TUNED_SLEEP_S": str(sleep_s)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, errors = process.communicate(timeout=120)
    return process.returncode, said + errors


def forks_of(socket: Path) -> list[int]:
    """Of the template: the processes between, supervisors, warm processes and ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_of_it = str(socket).encode() in (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if is_of_it and parent != os.getpid():
            found.append(int(entry.name))
    return found


def test_a_forked_run_is_any_run(
    is_kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = ended(start(tmp_path / "forked"))
    assert code == 0, said
    assert is_kept.exists()
    monkeypatch.setenv(template.VARIABLE, str(tmp_path / "nobody"))
    code, said = ended(start(tmp_path / "cold"))
    assert code == 0, said
    forked, cold = (open_run(tmp_path / name).scalars()["train/loss"] for name in RUNS)
    assert len(forked) > 5
    assert list(forked.values) == list(cold.values)
    weights = [torch.load(tmp_path / n / "checkpoints/weights.pt") for n in RUNS]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_its_exit_code_is_the_runs(is_kept: Path, tmp_path: Path) -> None:
    code, said = ended(start(tmp_path, "max_steps=no"))
    assert is_kept.exists()
    assert code == 2, said
    assert "max_steps" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_whoever_started_it_can_end_it(is_kept: Path, tmp_path: Path, number: int) -> None:
    until(lambda: not forks_of(is_kept), "earlier runs are gone", 20)
    process = start(tmp_path, "max_steps=1000", sleep_s=0.1)
    until(lambda: any(tmp_path.glob("checkpoints/*/manifest.json")), "a first save")
    assert len(forks_of(is_kept)) >= 4  # between, supervisor, ranks
    process.send_signal(number)
    code, said = ended(process)
    assert code == (Preempted.exit_code if number == signal.SIGTERM else -number), said
    until(lambda: not forks_of(is_kept), "all of its processes end", 20)
