"""`python script.py` without the launcher: Ctrl-C stops and saves, and it is said how to resume."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Preempted, Task, Trainer, open_run
from drivetrain.config.command_line import argv_of_script
from drivetrain.core.errors import StoppedByCtrlC
from drivetrain.record import plain_run, requests, session
from drivetrain.record.plain_run import how_to_resume, is_plain
from drivetrain.record.requests import StopRequest
from drivetrain.record.status import status_of

DATA = """
import sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import drivetrain

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)

def samples():
    x = torch.randn(320, 4, generator=torch.Generator().manual_seed(1))
    return Slow(x, (x.sum(1) > 0).long())

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

if __name__ == "__main__":
    config = drivetrain.load_config(defaults={"global_batch_size": 8, "max_steps": 60})
"""
FIT = """
    task = drivetrain.Task(lambda: nn.Linear(4, 2), loss)
    drivetrain.Trainer(task, config).fit(samples())
    print("the script goes on")
"""
OWN_LOOP = """
    loop = drivetrain.prepare(lambda: nn.Linear(4, 2), None, samples(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
    print("the script goes on")
"""
# as on macOS: they do not inherit how their parent handles signals
SPAWNS = FIT.replace(
    "samples()", 'DataLoader(samples(), num_workers=1, multiprocessing_context="spawn")'
)


class Script:
    """A script in a terminal of its own, whose Ctrl-C reaches all of its processes."""

    def __init__(self, folder: Path, body: str, *words: str) -> None:
        (folder / "train.py").write_text(DATA + body)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "train.py", "name=it", *words],
            cwd=folder,
            env={**os.environ, "PWD": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # a shell's background job would ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def wait_for(self, beginning: str) -> None:
        assert self.process.stdout is not None
        lines = ""
        for line in self.process.stdout:
            lines += line
            if line.startswith(beginning):
                return
        raise AssertionError(f"it ended without {beginning!r}: {lines}")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        try:
            said, _ = self.process.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode, said


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (FIT, signal.SIGINT),
        pytest.param(OWN_LOOP, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(SPAWNS, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(FIT, signal.SIGTERM, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["fit", "own loop", "spawned data workers", "SIGTERM"],
)
def test_it_saves_and_what_it_prints_resumes_it(tmp_path: Path, body: str, number: int) -> None:
    script = Script(tmp_path, body)
    script.wait_for("step ")
    script.interrupt(number)
    code, said = script.end()
    assert code == Preempted.exit_code, said
    assert "Traceback" not in said
    assert "the script goes on" not in said
    name = signal.Signals(number).name
    told = re.search(
        rf"^stopped by {name} after step (\d+), which was saved in .* s; (.*)$", said, re.M
    )
    assert told is not None, said
    step, resume = int(told[1]), told[2]
    assert 0 < step < 60
    words = f"DRIVETRAIN_RUN_DIR=runs/it {shlex.quote(sys.executable)} -u train.py name=it"
    assert resume == f"to resume: {words}"
    status = status_of(open_run(tmp_path / "runs/it"), now_s=0.0)
    assert (status.state, status.step) == ("preempted", step)
    again = subprocess.run(
        ["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"resumed: after step {step}, from step-" in again.stdout
    assert "step 60/60" in again.stdout
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["it"]


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    sleeps = OWN_LOOP.replace("loop.step()", 'loop.step(); print("asleep"); time.sleep(300)')
    script = Script(tmp_path, sleeps)
    script.wait_for("asleep")
    script.interrupt()
    script.wait_for("Ctrl-C: the run will save and stop; press it again to end at once")
    time.sleep(requests._SAME_CTRL_C_S + 0.1)
    script.interrupt()
    code, said = script.end()
    assert code == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")


# In a larger program Ctrl-C is that program's: these tests run in one.


@pytest.fixture
def default_handler() -> Iterator[None]:
    """A test run in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class InterruptedAt(Hook):
    def __init__(self, point: str) -> None:
        self.point = point

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if self.point == "step":
            os.kill(os.getpid(), signal.SIGINT)

    def on_fit_end(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def fit(config: dict[str, Any], point: str) -> Trainer:
    data = TensorDataset(torch.ones(8, 4))
    task = Task(lambda: nn.Linear(4, 1), lambda model, batch: model(batch[0]).mean())
    trainer = Trainer(
        task, {"global_batch_size": 4, "max_steps": 4, **config}, [InterruptedAt(point)]
    )
    trainer.fit(data)
    return trainer


@pytest.mark.usefixtures("default_handler")
def test_under_a_test_runner_it_remains_an_interrupt(quiet: dict[str, Any]) -> None:
    assert not is_plain()
    with pytest.raises(KeyboardInterrupt):
        fit(quiet, "step")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, default_handler: None) -> None:
    """As if this process ran nothing but a script."""
    monkeypatch.setattr(plain_run, "runs_own_command_line", lambda: True)


@pytest.mark.usefixtures("plain")
def test_a_script_can_catch_it_and_the_handler_is_back(quiet: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(quiet, "step")
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == Preempted.exit_code
    # a loop over settings that goes on after errors must not go on after Ctrl-C
    assert not isinstance(caught.value, Exception)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("plain")
def test_one_that_comes_too_late_interrupts_the_script_once_all_is_written(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit({**quiet, "name": "it"}, "end")
    assert (tmp_path / "it/checkpoints/weights.pt").exists()
    assert status_of(open_run(tmp_path / "it"), now_s=0.0).state == "finished"


@pytest.mark.usefixtures("plain")
def test_where_nothing_is_saved_it_is_not_said_how_to_resume(quiet: dict[str, Any]) -> None:
    with pytest.raises(StoppedByCtrlC, match=r"no checkpoints .* so it cannot be resumed$"):
        fit({**quiet, "checkpoint": {"every_steps": None}}, "step")


@pytest.mark.usefixtures("plain")
def test_a_handler_of_the_scripts_own_stays() -> None:
    def own(*_: object) -> None: ...

    signal.signal(signal.SIGINT, own)
    request = StopRequest()
    request.listen()
    assert signal.getsignal(signal.SIGINT) is own
    assert signal.getsignal(signal.SIGTERM) == request._note
    request.close()
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.usefixtures("plain")
def test_only_a_script_that_runs_by_itself_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain()
    in_thread: list[bool] = []
    thread = threading.Thread(target=lambda: in_thread.append(is_plain()))
    thread.start()
    thread.join()
    assert in_thread == [False]
    with monkeypatch.context() as at_a_prompt:
        at_a_prompt.setattr(sys, "ps1", ">>> ", raising=False)
        assert not is_plain()
    monkeypatch.setenv(session.SESSION, "session")
    assert not is_plain()


def test_a_ray_worker_is_not_a_plain_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that ended with SystemExit would end the worker, and its error would be lost."""
    # pytest-xdist's workers have no script, as a notebook has none
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    worker = "/site-packages/ray/_private/workers/default_worker.py"
    monkeypatch.setattr(sys, "argv", [worker, "--node-ip-address=10.0.0.1"])
    assert not is_plain()
    assert argv_of_script() == []
    monkeypatch.setattr(sys, "argv", ["default_worker.py"])  # a script of the user's own
    assert is_plain()


@pytest.mark.usefixtures("plain")
def test_how_to_resume_is_said_as_the_run_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "name=my run"])
    monkeypatch.setattr(session, "_opened", 1)
    run_dir = tmp_path / "runs" / "my run"
    assert how_to_resume(run_dir) == (
        "to resume: DRIVETRAIN_RUN_DIR='runs/my run' python train.py 'name=my run'"
    )
    with monkeypatch.context() as moved:  # the script has, since it was started
        moved.setenv("PWD", "/elsewhere")
        assert f"DRIVETRAIN_RUN_DIR='{run_dir}' python" in how_to_resume(run_dir)
    with monkeypatch.context() as later:
        later.setattr(session, "_opened", 2)
        assert "checkpoint.resume_from=runs/my run in its config" in how_to_resume(run_dir)
    with monkeypatch.context() as launched:
        launched.setenv(session.SESSION, "session")
        assert how_to_resume(run_dir) == (
            "to resume, run the same command again with --run-dir 'runs/my run' before the script"
        )
    with monkeypatch.context() as torchrun:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
            torchrun.setenv(name, value)
        torchrun.setenv("MASTER_ADDR", "127.0.0.1")
        assert how_to_resume(run_dir) == (
            "to resume, set DRIVETRAIN_RUN_DIR='runs/my run' and run the same command again"
        )
    monkeypatch.setenv(session.RUN_DIR, str(run_dir))
    assert how_to_resume(run_dir) == "run the same command again to resume"
