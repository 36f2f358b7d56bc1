"""Coordinated: the base of targets without a scheduler, with a coordinator on the client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain.core.bounded import read_json, read_text
from drivetrain.core.errors import DamagedRun, DrivetrainError
from drivetrain.launch.coordinator.coordinator import END, RESUME_ME
from drivetrain.launch.coordinator.member import FILE as MEMBERS
from drivetrain.launch.coordinator.member import LOGS, coordinator_lock_holder, read_members
from drivetrain.launch.job import Job
from drivetrain.launch.tail import tail
from drivetrain.launch.target import State, Status

_START_S = 30.0
_MODULE = "drivetrain.launch.coordinator.coordinator"


class Coordinated:
    """The methods of a target whose job is a background coordinator on the client."""

    def poll(self, job: Job, job_id: str) -> Status:
        """Return the status that the coordinator reports."""
        return poll(job, job_id)

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """Yield what all hosts printed."""
        return logs(job, job_id, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        """Ask all hosts to save and end."""
        stop(job, job_id)


def start(job: Job) -> str:
    """Start the coordinator for a run directory; return its host and process id."""
    run_dir = Path(job.run_dir)
    (run_dir / END).unlink(missing_ok=True)
    (run_dir / LOGS).mkdir(exist_ok=True)
    with (run_dir / LOGS / "coordinator.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(run_dir.absolute())],
            cwd=job.working_dir,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + _START_S
    while coordinator_lock_holder(run_dir) is None and not (run_dir / END).exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = read_text(run_dir / LOGS / "coordinator.txt")
            raise DrivetrainError(f"the job could not be started: {said.strip()}")
        time.sleep(0.02)
    return f"{socket.gethostname()}:{process.pid}"


def poll(job: Job, job_id: str) -> Status:
    """Running while the coordinator runs; then what it has recorded."""
    run_dir = Path(job.run_dir)
    hosts = _hosts(run_dir / MEMBERS)
    if coordinator_lock_holder(run_dir):
        return Status(State.RUNNING, hosts=hosts)
    try:
        code = int(read_json(run_dir / END)["exit_code"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedRun(f"{run_dir / END}: no exit code in it ({error})") from None
    except FileNotFoundError:
        return Status(State.FAILED, f"its coordinator, {job_id}, was killed", hosts)
    if code == 0:
        return Status(State.FINISHED, hosts=hosts, exit_code=0)
    if code == RESUME_ME:
        return Status(State.STOPPED, "saved", hosts, code)
    return Status(State.FAILED, f"exit code {code}", hosts, code)


def _hosts(path: Path) -> tuple[str, ...]:
    try:
        return tuple(str(member.host) for member in read_members(path).members)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRun(f"{path}: not a list of job members ({error})") from None


def logs(job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
    """Yield what all hosts printed."""
    folder = Path(job.run_dir) / LOGS

    def is_over() -> bool:
        return poll(job, job_id).state.is_over

    return tail(lambda: sorted(folder.glob("*.txt")), is_over, follow=follow)


def stop(job: Job, job_id: str) -> None:
    """Ask the coordinator, which asks the hosts, and wait until it has ended."""
    run_dir = Path(job.run_dir)
    found = coordinator_lock_holder(run_dir)
    if found is None:
        return
    host, pid = found
    if host != socket.gethostname():
        raise DrivetrainError(f"job {job_id} was started on {host}: stop it there")
    signal_coordinator(run_dir, pid)
    deadline_s = time.monotonic() + job.grace_s + 30
    while coordinator_lock_holder(run_dir) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def signal_coordinator(run_dir: Path, pid: int) -> None:
    """Send SIGTERM to `pid` if it is this run's coordinator: the lock file may name any process."""
    if pid > 1 and _is_coordinator(run_dir, pid):
        os.kill(pid, signal.SIGTERM)
        return
    raise DrivetrainError(
        f"{run_dir}: its lock names process {pid}, which is not the coordinator of this run;"
        " nothing was stopped; check that process and stop it by hand"
    )


def _is_coordinator(run_dir: Path, pid: int) -> bool:
    """True if the process's command line is that of this run's coordinator."""
    try:
        argv = read_command(pid)
        named = Path(argv[-1])
        return _MODULE in argv and named.is_absolute() and named.samefile(run_dir)
    except (OSError, IndexError):
        return False


def read_command(pid: int) -> list[str]:
    """Return the argv of a process, from ps if there is no /proc."""
    if Path("/proc/self/cmdline").exists():
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return data.decode(errors="replace").rstrip("\0").split("\0")
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    before, found, run_dir = said.partition(f" {_MODULE} ")
    return [*before.split(), _MODULE, run_dir] if found else said.split()
