"""Ranks and supervisors that are killed before anything trains, and hangs that come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drivetrain.supervise.processes.head_start import HeadStart, request
from drivetrain.verify.drills.drill import weights_fingerprint
from tests.launch.test_supervision import Run

# Stands for a library whose import takes long: until the file `go` is there.
_SLOW_LIBRARY = """\
import os, time
from pathlib import Path

here = Path(__file__).parent
(here / f"importing-{os.environ['RANK']}-{os.getpid()}").touch()
while not (here / "go").exists():
    time.sleep(0.01)
"""
_SCRIPT = """\
import slow_library
from drivetrain.verify.drills import workload
workload.main()
"""
# In the second start rank 1 is killed while it imports; the first one fails after 15 steps.
_KILLED_IN_ITS_SECOND_START = """\
import os, signal
from pathlib import Path

mine = Path(__file__).parent / f"start-{os.environ['RANK']}"
start = len(mine.read_text()) if mine.exists() else 0
mine.write_text("x" * (start + 1))
if start == 1 and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
from drivetrain.verify.drills import workload
real, count = workload.loss, [0]
def loss(model, batch):
    count[0] += 1
    if count[0] > 90 and start == 0:
        raise OSError("a disk is gone")
    return real(model, batch)
workload.loss = loss
workload.main()
"""
_HANGS = """\
import time
from drivetrain.verify.drills import workload
real, count = workload.loss, [0]
def loss(model, batch):
    count[0] += 1
    if count[0] > 90: time.sleep(600)
    return real(model, batch)
workload.loss = loss
workload.main()
"""


def script_in(folder: Path, text: str = _SCRIPT) -> Path:
    (folder / "slow_library.py").write_text(_SLOW_LIBRARY)
    path = folder / "script.py"
    path.write_text(text)
    return path


def importing(folder: Path, rank: int) -> int:
    """The process of a rank that is in the middle of its import."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for found in folder.glob(f"importing-{rank}-*"):
            return int(found.name.rpartition("-")[2])
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} did not begin to import")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def train(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", "train", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    run = Run(folder, str(script_in(folder)), start="--spares=0")
    assert run.end()[0] == 0
    return weights_fingerprint(run.directory)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(signal.SIGBUS, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_rank_killed_in_an_import_is_restarted_and_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: str, number: signal.Signals
) -> None:
    run = Run(tmp_path, str(script_in(tmp_path)), start="--spares=0")
    pid = importing(tmp_path, 1)
    os.kill(pid, number)
    (tmp_path / "go").touch()
    code, stderr = run.end()
    assert code == 0
    told = f"rank 1 (pid {pid}, {os.uname().nodename}) was killed by {number.name} before its"
    assert f"{told} first step; restarting\n" in stderr
    assert weights_fingerprint(run.directory) == undisturbed


def test_a_supervisor_killed_while_its_ranks_import_is_restarted(
    tmp_path: Path, undisturbed: str
) -> None:
    run = Run(tmp_path, str(script_in(tmp_path)), start="--spares=0")
    os.kill(parent(importing(tmp_path, 1)), signal.SIGKILL)
    (tmp_path / "go").touch()
    code, stderr = run.end()
    assert code == 0
    assert "the supervisor was killed by SIGKILL; restarting it\n" in stderr
    assert weights_fingerprint(run.directory) == undisturbed


def test_a_run_asked_to_stop_while_its_ranks_import_says_resume_me(tmp_path: Path) -> None:
    run = Run(tmp_path, str(script_in(tmp_path)), start="--spares=0")
    importing(tmp_path, 1)
    run.process.send_signal(signal.SIGTERM)
    code, stderr = run.end()
    assert code == 75
    assert "stopped by SIGTERM before its first step; run the same command again" in stderr


def test_a_second_ctrl_c_says_what_is_lost_and_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_DRILL_PAUSE_S", "0.4")  # of 12 micro-batches in each step
    words = ("-m", "drivetrain.verify.drills.workload", "checkpoint.every_steps=1")
    run = Run(tmp_path, *words, ranks=1, start="--spares=0")
    run.wait_for(1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2.5)  # a step takes 4.8 s
    run.process.send_signal(signal.SIGINT)
    code, stderr = run.end()
    assert code == 75
    asked = "asking the ranks to save and stop; press Ctrl-C again to stop at once, without saving"
    assert stderr.count(asked) == 1
    said = "stopped after step 1: a second SIGINT ended it at once"
    kept = "the newest checkpoint is of step 1: run the same command again to resume"
    assert f"{said}; {kept}\n" in stderr
    end = json.loads((run.directory / "attempts" / "0001" / "end.json").read_text())
    assert (end["kind"], end["detail"], end["restarts"]) == ("preempted", said, False)


def test_ranks_with_a_head_start_can_be_stopped_before_their_supervisor_listens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now_s, killed = [100.0], []
    one = HeadStart.__new__(HeadStart)
    one.asked, one.request_said_s = "", None
    one.node = SimpleNamespace(kill=lambda: killed.append(True))  # type: ignore[assignment]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    one._note(signal.SIGINT, None)
    assert capfd.readouterr().err == f"{request('SIGINT')}\n", "at once: its imports take seconds"
    now_s[0] += 0.5
    one._note(signal.SIGINT, None)
    assert (one.asked, killed) == ("SIGINT", [])
    now_s[0] += 0.6
    with pytest.raises(SystemExit) as caught:
        one._note(signal.SIGINT, None)
    assert (caught.value.code, killed) == (130, [True])
    assert "a second SIGINT ended it at once" in capfd.readouterr().err


def test_a_script_whose_import_is_always_killed_ends_after_three_restarts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nfrom drivetrain import Trainer\n"
    )
    ended = train(str(script))
    assert ended.returncode == 137
    assert ended.stderr.count("; restarting\n") == 3
    assert "not restarted: restart budget exhausted: 3 failures before the first" in ended.stderr
    assert "either something outside the run killed it, or the kernel did" in ended.stderr
    assert "micro_batch_size" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import not_there, drivetrain\n", 1, "ModuleNotFoundError: No module named 'not_there'"),
        (
            "import os, drivetrain\nos.kill(os.getpid(), 11)\n",
            139,
            "killed by SIGSEGV: native code crashed; PYTHONFAULTHANDLER=1 shows the Python stack",
        ),
        (
            "import os\nos.kill(os.getpid(), 9)\n",
            137,
            "not restarted: no rank had called Trainer.fit or prepare, so the script could only",
        ),
    ],
)
def test_what_fails_again_or_could_only_start_over_ends_at_once(
    tmp_path: Path, text: str, code: int, told: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = train(str(script))
    assert ended.returncode == code
    assert told in ended.stderr
    assert "restarting" not in ended.stderr


def test_ranks_killed_before_they_open_an_attempt_leave_the_last_ones_record_alone(
    tmp_path: Path, undisturbed: str
) -> None:
    script = script_in(tmp_path, _KILLED_IN_ITS_SECOND_START)
    run = Run(tmp_path, str(script), start="--spares=0")
    code, stderr = run.end()
    assert code == 0
    assert "was killed by SIGKILL before its first step; restarting from the newest" in stderr
    attempts = run.directory / "attempts"
    first, second = (json.loads((attempts / n / "end.json").read_text()) for n in ("0001", "0002"))
    assert (first["kind"], first["step"], first["restarts"]) == ("failed", 15, True)
    assert "OSError: a disk is gone" in first["failures"][0]["error"]
    assert (second["kind"], second["step"]) == ("finished", 30)
    assert weights_fingerprint(run.directory) == undisturbed


def test_a_hang_that_comes_back_at_the_same_place_is_not_tried_a_third_time(
    tmp_path: Path,
) -> None:
    script = script_in(tmp_path, _HANGS)
    words = ("--stall-timeout=1.5", str(script), "checkpoint.every_steps=100")
    run = Run(tmp_path, *words, ranks=1, start="--spares=0")
    code, stderr = run.end()
    assert code == 1
    assert stderr.count("restarting") == 1
    told = "it hung twice after step 7 at the same place (rank 0 at script.py:6 in loss)"
    assert told in stderr
    end = json.loads((run.directory / "attempts" / "0002" / "end.json").read_text())
    assert end["why"].startswith(told)
