"""Plain machines over a real ssh, and this machine in the background."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from drivetrain.launch import submission
from drivetrain.launch.target import State
from drivetrain.testing.hosts import CommandFailed, Host, hosts_available, make_hosts
from drivetrain.testing.ssh import boot_sshd, ssh_available, start_sshd
from tests.targets.running import (
    DRIVETRAIN,
    ENVIRONMENT,
    QUICK,
    ROOT,
    SAVES_ONLY_WHEN_ASKED,
    STEPS,
    WORKLOAD,
    alone,
    assert_same_losses,
    assert_same_weights,
    is_training,
    newest_step,
    processes_of,
    slowly,
    wait_for_step,
    wait_until,
)

_REASON = hosts_available() or ssh_available()
pytestmark = pytest.mark.slow
over_ssh = pytest.mark.skipif(bool(_REASON), reason=_REASON or "")


class Desk:
    """A host from which two others are reached by ssh."""

    def __init__(self, host: Host, machines: list[Host], ssh: str, folder: Path) -> None:
        self.host, self.machines, self.ssh, self.folder = host, machines, ssh, folder
        self.run, self.file = folder / "run", folder / "hosts"
        self.file.write_text("".join(f"{machine.name} slots=2\n" for machine in machines))
        self.cwd = folder
        (folder / "tmp").mkdir()

    def types(self, *words: str, timeout_s: float = 500) -> str:
        done = self.host.run(
            [*DRIVETRAIN, *words], env=ENVIRONMENT, cwd=self.cwd, timeout_s=timeout_s
        )
        return str(done.stdout)

    def train(self, *words: str) -> str:
        variables = {"TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        if "PYTHONPATH" in os.environ:
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        env = [f"--env={name}={value}" for name, value in variables.items()]
        flags = [f"--hosts={self.file}", f"--ssh={self.ssh}", f"--run-dir={self.run}", *env]
        return self.types("train", *flags, *words)

    def state(self) -> State:
        return submission.load(self.run).status().state


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ExitStack() as stack:
        *machines, host = stack.enter_context(make_hosts(3))
        ssh = stack.enter_context(start_sshd(machines))
        yield Desk(host, machines, ssh, tmp_path)


@over_ssh
@pytest.mark.parametrize("name", ["digits.py", pytest.param("gpt.py", marks=pytest.mark.long)])
def test_two_machines_train_what_one_process_trains(desk: Desk, name: str) -> None:
    script = str(ROOT / "examples" / name)
    said = desk.train("--wait", *QUICK, script, *STEPS)
    assert "2 nodes × 2 processes" in said
    assert "step 20/20" in said
    assert "finished" in desk.types("jobs", str(desk.run))
    assert_same_losses(desk.run, alone(desk.folder, script, *STEPS))


@over_ssh
@pytest.mark.long
def test_a_crashed_machine_comes_back_and_nothing_is_lost(desk: Desk) -> None:
    reference = alone(desk.folder, *WORKLOAD, ranks=4)
    desk.train(*slowly(0.05), *QUICK, *WORKLOAD)
    wait_for_step(desk.run, 10)
    desk.machines[1].crash()
    boot_sshd(desk.machines[1], Path(desk.ssh.split()[-1]).parent)
    wait_until(lambda: desk.state().is_over, "the end", 120)
    assert desk.state() is State.FINISHED
    assert "the connection to the host was lost; restarting it" in desk.types("logs", str(desk.run))
    assert_same_weights(desk.run, reference)


@over_ssh
@pytest.mark.long
def test_stop_saves_on_all_machines_and_leaves_nothing(desk: Desk) -> None:
    desk.train(*slowly(0.5), *QUICK, *WORKLOAD, SAVES_ONLY_WHEN_ASKED)
    wait_until(lambda: is_training(desk.run), "training")
    desk.types("stop", str(desk.run))
    assert desk.state() is State.STOPPED
    assert newest_step(desk.run) > 0
    wait_until(lambda: not processes_of(desk.run), "no process left", 10)


@over_ssh
def test_everything_that_is_missing_is_said_before_the_start(desk: Desk) -> None:
    with desk.file.open("a") as file:
        file.write("h9 slots=2\n")
    with pytest.raises(CommandFailed) as failure:
        desk.train("--python=/nowhere/python", *WORKLOAD)
    said = failure.value.stderr
    assert failure.value.returncode == 4
    assert "h1: it has no /nowhere/python; write --python PATH" in said
    assert "h2: it has no /nowhere/python" in said
    assert "h9: ssh: " in said
    assert "check that `ssh h9 true` works without a password" in said


@over_ssh
@pytest.mark.long
def test_sync_brings_the_code_to_machines_that_do_not_share_it(desk: Desk) -> None:
    code = desk.folder / "code"
    (code / "runs").mkdir(parents=True)
    (code / "train.py").write_text("import helper; helper.hello()\n")
    (code / "helper.py").write_text("def hello(): print('hello from the copy', flush=True)\n")
    for machine in desk.machines:  # sshd has mounts of its own: only this machine sees it
        desk.host.run([*desk.ssh.split(), machine.name, "mount", "-t", "tmpfs", "none", str(code)])
    desk.cwd = code
    with pytest.raises(
        CommandFailed, match="h1: it has no train.py in .*; share that directory, or"
    ):
        desk.train("--wait", "train.py")
    said = desk.train("--sync", "--wait", "--nproc-per-node=1", "train.py")
    assert said.count("hello from the copy") == 2


@pytest.mark.long
def test_on_this_machine_in_the_background(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def types(*typed: str) -> str:
        done = subprocess.run(
            [*DRIVETRAIN, *typed],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
            check=True,
            timeout=500,
        )
        return done.stdout

    flags = ["--on=local", f"--run-dir={run}", "--nproc-per-node=2", *slowly(0.05), *QUICK]
    types("train", *flags, *WORKLOAD, SAVES_ONLY_WHEN_ASKED)
    wait_until(lambda: is_training(run), "training")
    assert "running" in types("jobs", str(run))
    types("stop", str(run))
    assert "stopped" in types("jobs", str(run))
    assert 0 < newest_step(run) < 60
    types("resume", str(run))
    types("logs", str(run), "-f")  # until it is over
    assert "finished" in types("jobs", str(run))
    assert_same_weights(run, alone(tmp_path, *WORKLOAD, ranks=2))


@pytest.mark.long
def test_a_killed_coordinator_takes_the_run_with_it_after_saving(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--on=local", f"--run-dir={run}", *slowly(0.5), *QUICK]
    words = [*WORKLOAD, SAVES_ONLY_WHEN_ASKED]
    subprocess.run([*DRIVETRAIN, "train", *flags, *words], check=True, env=ENVIRONMENT)
    wait_until(lambda: is_training(run), "training")
    pid = int(json.loads((run / "job.json").read_text())["id"].rpartition(":")[2])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes_of(run), "no process left", 40)
    assert newest_step(run) > 0
    status = submission.load(run).status()
    assert status.state is State.FAILED
    assert "was killed" in status.detail
