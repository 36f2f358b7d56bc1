"""Before a job is started over ssh: does each machine answer, and does it have what is needed?"""

from __future__ import annotations

import shlex
import subprocess
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivetrain._version import __version__
from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.launch.job import Job

_ANSWER_S = 120
_NOT_COPIED = (".git", ".venv", "__pycache__", "runs")
_NO_FOLDER, _NO_SCRIPT, _NOT_SHARED = 91, 92, 93
"""Exit codes of our own line of shell; ssh's is 255, the shell's own are 126 and 127."""


def over_ssh(ssh: str, machine: str, line: str) -> tuple[str, ...]:
    """A line of shell on a machine, as a command here."""
    return (*shlex.split(ssh), machine, line)


def copy_code(machines: Sequence[str], ssh: str, folder: str) -> None:
    """The working directory to the same path on every machine; nothing is deleted there."""
    left_out = [f"--exclude={name}" for name in _NOT_COPIED]

    def copy(machine: str) -> Problem | None:
        there = f"{machine}:{folder}/"
        done = _run(["rsync", "-az", "--mkpath", *left_out, "-e", ssh, f"{folder}/", there])
        if done.returncode == 0:
            return None
        remedy = "is rsync there, and may you write the folder?"
        return Problem(machine, f"--sync: {_said(done)}", remedy, has_value=False)

    _ask_all(machines, copy)


def check_machines(machines: Sequence[str], ssh: str, job: Job, python: str) -> None:
    """Everything that is missing on any of them, at once."""
    token = Path(job.run_dir) / f".seen-by-all-{uuid.uuid4().hex[:8]}"
    code = "from drivetrain._version import __version__; print(__version__)"
    variables = [f"{name}={value}" for name, value in job.environment]
    line = (
        f"cd {shlex.quote(job.working_dir)} || exit {_NO_FOLDER};"
        f" {_has_script(job)} || exit {_NO_SCRIPT};"
        f" test -e {shlex.quote(str(token))} || exit {_NOT_SHARED};"
        f" exec env {shlex.join([*variables, python, '-c', code])}"
    )

    def check(machine: str) -> Problem | None:
        return _judge(machine, _run(over_ssh(ssh, machine, line)), job, python)

    token.touch()
    try:
        _ask_all(machines, check)
    finally:
        token.unlink()


def _has_script(job: Job) -> str:
    is_file = not job.is_module and "--no-python" not in job.flags
    return f"test -e {shlex.quote(job.script)}" if is_file else "true"


def _judge(
    machine: str, done: subprocess.CompletedProcess[str], job: Job, python: str
) -> Problem | None:
    found = done.stdout.strip()
    if done.returncode == 0 and found == __version__:
        return None
    match done.returncode:
        case 0:
            rule = f"it has drivetrain {found}, this client {__version__}"
            remedy = "install the same on all"
        case 255:
            rule = f"ssh: {_said(done).removeprefix('ssh: ')}"
            remedy = f"does `ssh {machine} true` work without a password?"
        case n if n == _NO_FOLDER:
            rule, remedy = f"it has no {job.working_dir}", "share that folder, or add --sync"
        case n if n == _NO_SCRIPT:
            rule = f"it has no {job.script} in {job.working_dir}"
            remedy = "share that folder, or add --sync"
        case n if n == _NOT_SHARED:
            rule = f"it does not see the run's directory {job.run_dir}"
            remedy = "--run-dir DIR on storage that all machines share"
        case 126 | 127:
            rule, remedy = f"it has no {python}", "--python PATH, the same on all"
        case _:
            rule, remedy = _said(done), "install drivetrain for that Python, or --python PATH"
    return Problem(machine, rule, remedy, has_value=False)


def _ask_all(machines: Sequence[str], ask: Callable[[str], Problem | None]) -> None:
    with ThreadPoolExecutor(max_workers=32) as pool:
        problems = [problem for problem in pool.map(ask, machines) if problem is not None]
    if problems:
        raise EnvironmentProblem(problems)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_S,
        )
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", f"no {error.filename} on this machine")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 255, "", f"no answer within {_ANSWER_S} s")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Its last line, which is the one that says what is wrong."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1].strip() if lines else f"exit code {done.returncode}"
