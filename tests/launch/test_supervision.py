"""The supervisor as a user meets it: real processes, killed, preempted, doubled, stuck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.storage import storage_at
from drivetrain.record.session import read_progress
from drivetrain.verify.drills.drill import weights_fingerprint

WORKLOAD = ("-m", "drivetrain.verify.drills.workload")


class Run:
    """`drivetrain train` on the drills' workload, with an eye on its ranks."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        ranks: int = 2,
        name: str = "run",
        start: str = "--warm-start",
    ) -> None:
        self.directory = folder / name
        self.temporary = folder / f"tmp-{name}-{time.monotonic_ns()}"
        self.temporary.mkdir()
        flags = [f"--run-dir={self.directory}", f"--nproc-per-node={ranks}", start]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain", "train", *flags, *words],
            env={**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks = ranks

    def pids(self) -> list[int]:
        found = []
        for session in self.temporary.glob("drivetrain-*"):
            pages = [read_progress(session, rank) for rank in range(self.ranks)]
            found += [page.pid for page in pages if page is not None]
        return found

    def wait_for(self, step: int) -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, "it ended too early"
            manifests = (self.directory / "checkpoints").glob("step-*/manifest.json")
            if any(int(path.parent.name.split("-")[1]) >= step for path in manifests):
                return
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not saved in time")

    def end(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=90)
        return self.process.returncode, stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(tmp_path_factory.mktemp("undisturbed"), *WORKLOAD)
    assert run.end()[0] == 0
    return weights_fingerprint(run.directory)


@pytest.mark.parametrize(  # the second: with a head start
    "start",
    [pytest.param("--warm-start", marks=[pytest.mark.slow, pytest.mark.long]), "--spares=2"],
)
def test_a_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: str, start: str
) -> None:
    run = Run(tmp_path, *WORKLOAD, start=start)
    run.wait_for(10)
    os.kill(run.pids()[1], signal.SIGKILL)
    code, stderr = run.end()
    assert code == 0
    assert "rank 1 (pid" in stderr
    assert "was killed by SIGKILL after step" in stderr
    assert "restarting from the newest checkpoint" in stderr
    assert weights_fingerprint(run.directory) == undisturbed
    end = json.loads((run.directory / "attempts" / "0001" / "end.json").read_text())
    assert (end["kind"], end["failures"][0]["exit_code"]) == ("failed", -9)


def test_preempted_it_saves_says_resume_me_and_goes_on_with_the_same_command(
    tmp_path: Path, undisturbed: str
) -> None:
    run = Run(tmp_path, *WORKLOAD)
    run.wait_for(5)
    run.process.send_signal(signal.SIGTERM)
    code, stderr = run.end()
    assert code == 75
    assert "stopped by SIGTERM and saved after step" in stderr
    again = Run(tmp_path, *WORKLOAD)
    assert again.end()[0] == 0
    assert weights_fingerprint(run.directory) == undisturbed


@pytest.mark.slow
@pytest.mark.long
def test_of_two_launchers_on_one_run_the_first_can_commit_nothing_more(
    tmp_path: Path,
) -> None:
    first = Run(tmp_path, *WORKLOAD, "max_steps=100000")
    first.wait_for(5)
    # as on another host, where a file server has given up the first's lock
    (first.directory / "launcher.lock").unlink()
    second = Run(tmp_path, *WORKLOAD, "max_steps=100000")
    code, stderr = first.end()
    assert code == 77
    assert "another attempt has taken over the run" in stderr
    second.process.send_signal(signal.SIGTERM)
    assert second.end()[0] == 75
    storage = storage_at(first.directory / "checkpoints")
    took_over_at = lineage.read_claims(storage)[1].step
    good = [entry for entry in catalogue.entries(storage) if entry.manifest is not None]
    assert good[0].attempt == 2
    assert all(entry.step <= took_over_at for entry in good if entry.attempt == 1)


def test_a_rank_that_is_stopped_is_noticed_and_every_stack_is_kept(
    tmp_path: Path, undisturbed: str
) -> None:
    run = Run(tmp_path, "--stall-timeout=1.5", *WORKLOAD)
    run.wait_for(10)
    os.kill(run.pids()[1], signal.SIGSTOP)
    code, stderr = run.end()
    assert code == 0
    assert "no progress for" in stderr
    stacks = run.directory / "attempts" / "0001" / "stacks"
    assert "train/loop.py" in (stacks / "00000.txt").read_text()
    assert (stacks / "00001.txt").read_text().startswith("no answer")
    assert weights_fingerprint(run.directory) == undisturbed


def test_a_crash_loop_stops_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(
        "from drivetrain.verify.drills import workload\n"
        "real, count = workload.loss, [0]\n"
        "def loss(model, batch):\n"
        "    count[0] += 1\n"
        "    if count[0] > 90: raise ValueError('a bad batch')\n"
        "    return real(model, batch)\n"
        "workload.loss = loss\n"
        "workload.main()\n"
    )
    run = Run(tmp_path, str(script), "checkpoint.every_steps=100", ranks=1)
    code, stderr = run.end()
    assert code == 1
    assert "the same error occurred twice after step 7 (ValueError at crash.py:5 in loss)" in stderr
    last = "your code raised this after step 7, at crash.py:5 in loss: fix it; run"
    assert stderr.rstrip().splitlines()[-1].startswith(last)
    whole = run.directory / "attempts" / "0002" / "tracebacks" / "00000.txt"
    assert "train/loop.py" in whole.read_text()
    assert "train/loop.py" not in stderr
    assert str(whole) in stderr
    assert stderr.count("restarting") == 1
