"""The hosts target: machines over ssh, with one supervisor on each, started from the client.

The run directory must be on storage that all machines share: it holds the rendezvous and the
checkpoints. The code must be at the same path everywhere; `--sync` copies the working directory
there first.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain._version import __version__
from drivetrain.core.bounded import NotAFile, read_text
from drivetrain.core.errors import ConfigError, DamagedRun, EnvironmentProblem, Problem
from drivetrain.launch.coordinator import coordinated
from drivetrain.launch.coordinator.member import FILE, Member, Members, with_stdin_watchdog
from drivetrain.launch.job import Job, script_problems, shape_problems
from drivetrain.launch.target import Rendered, option

# The hosts file: one machine per line, in the format of MPI and DeepSpeed.
#
# # the name for ssh, and optionally the number of processes and the address for the other machines
# node-a slots=8
# node-b slots=8 address=10.0.0.2

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*")
"""Excludes everything that ssh would read as an option, or a shell as special characters."""


@dataclass(frozen=True)
class SshMachine:
    """One line of the hosts file."""

    name: str
    slots: int | None = None
    address: str | None = None

    @property
    def reached_at(self) -> str:
        """The address for the other machines: node-a for user@node-a."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[SshMachine, ...]:
    """Read the hosts file; ConfigError with all its problems."""
    try:
        lines = read_text(path).splitlines()
    except NotAFile as error:
        raise ConfigError([Problem("--hosts", error.rule, "give a file", str(path))]) from None
    except (OSError, ValueError, DamagedRun) as error:
        reason = getattr(error, "strerror", None) or f"cannot be read ({error})"
        problem = Problem("--hosts", reason, "give a file", str(path))
        raise ConfigError([problem]) from None
    problems: list[Problem] = []
    machines = list(_machines(path, lines, problems))
    if not machines and not problems:
        problems.append(Problem("--hosts", "lists no machine", "write one per line", str(path)))
    for name in sorted({m.name for m in machines if [n.name for n in machines].count(m.name) > 1}):
        remedy = "one line per machine; slots=N sets the number of processes"
        problems.append(Problem(str(path), "named twice", remedy, name))
    if len({machine.slots for machine in machines}) > 1:
        rule = "all machines must have the same number of slots"
        counts = ", ".join(f"{m.name}: {m.slots or 'none given'}" for m in machines)
        problems.append(Problem(str(path), rule, "give each machine the same slots=N", counts))
    if problems:
        raise ConfigError(problems)
    return tuple(machines)


def _machines(path: Path, lines: list[str], problems: list[Problem]) -> Iterator[SshMachine]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        values = dict(word.partition("=")[::2] for word in words[1:])
        slots = values.pop("slots", None)
        address = values.pop("address", None)
        where = f"{path}:{number}"
        for name in filter(None, (words[0], address)):
            if not _NAME.fullmatch(name):
                remedy = "NAME or USER@NAME, as for ssh"
                problems.append(Problem(where, "not a host name", remedy, name))
        for key, value in values.items():
            shown = f"{key}={value}" if value else key
            problems.append(Problem(where, "not understood", "NAME slots=N address=A", shown))
        if slots is not None and (
            not (slots.isascii() and slots.isdigit() and len(slots) < 10) or int(slots) < 1
        ):
            problems.append(
                Problem(where, "slots must be a whole number, at least 1", "slots=8", slots)
            )
            slots = None
        yield SshMachine(words[0], None if slots is None else int(slots), address)


# Checks before a job is started over ssh: each machine answers and has what is needed.

_ANSWER_S = 120
_NOT_COPIED = (".git", ".venv", "__pycache__", "runs")
_NO_FOLDER, _NO_SCRIPT, _NOT_SHARED = 91, 92, 93
"""Exit codes of the shell command below; ssh's is 255, the shell's are 126 and 127."""


def over_ssh(ssh: str, machine: str, line: str) -> tuple[str, ...]:
    """Return the local command that runs a shell command on a machine."""
    return (*shlex.split(ssh), machine, line)


def copy_code(machines: Sequence[str], ssh: str, folder: str) -> None:
    """Copy the directory to the same path on all machines; delete nothing there."""
    left_out = [f"--exclude={name}" for name in _NOT_COPIED]

    def copy(machine: str) -> Problem | None:
        there = f"{machine}:{folder}/"
        done = _run(["rsync", "-az", "--mkpath", *left_out, "-e", ssh, f"{folder}/", there])
        if done.returncode == 0:
            return None
        remedy = "check that rsync is installed there and that you can write to the directory"
        return Problem(machine, f"--sync: {_said(done)}", remedy, has_value=False)

    _ask_all(machines, copy)


def check_machines(machines: Sequence[str], ssh: str, job: Job, python: str) -> None:
    """Check all machines; EnvironmentProblem with everything that is missing."""
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
            rule = f"it has drivetrain {found}; this client has {__version__}"
            remedy = "install the same version on all machines"
        case 255:
            rule = f"ssh: {_said(done).removeprefix('ssh: ')}"
            remedy = f"check that `ssh {machine} true` works without a password"
        case n if n == _NO_FOLDER:
            rule, remedy = f"it has no {job.working_dir}", "share that directory, or add --sync"
        case n if n == _NO_SCRIPT:
            rule = f"it has no {job.script} in {job.working_dir}"
            remedy = "share that directory, or add --sync"
        case n if n == _NOT_SHARED:
            rule = f"it cannot see the run directory {job.run_dir}"
            remedy = "--run-dir DIR on storage that all machines share"
        case 126 | 127:
            rule, remedy = f"it has no {python}", "--python PATH, the same on all machines"
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
    """Return the last line of its output, which contains the error."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


_SSH = "ssh -T -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3"


@dataclass(frozen=True)
class SshHosts(coordinated.Coordinated):
    """Run on machines that ssh reaches without a password."""

    name: ClassVar[str] = "hosts"

    hosts: str | None = option("a file with one machine per line")
    ssh: str = option("the ssh command to reach them, with its options", _SSH)
    sync: bool = option("copy the working directory to each machine first, by rsync", False)
    python: str | None = option("Python on the machines; default: the path of this one")

    def fill_in(self, job: Job, given: Collection[str]) -> Job:
        """Use all machines and slots of the file, unless flags give other numbers."""
        machines = self._machines()
        if "--nnodes" not in given:
            job = dataclasses.replace(job, num_nodes=len(machines), max_nodes=len(machines))
        slots = machines[0].slots
        if slots is not None and not {"--nproc-per-node", "--gpus-per-node"} & set(given):
            job = dataclasses.replace(job, processes_per_node=slots)
        return job

    def problems(self, job: Job) -> list[Problem]:
        """Also check the number of machines, and refuse time limits, which nothing enforces."""
        found = [*script_problems(job), *shape_problems(job)]
        count = len(self._machines())
        if job.max_nodes > count:
            rule = f"{self.hosts} lists {count}"
            found.append(Problem("--nnodes", rule, "ask for fewer, or list more", job.max_nodes))
        if job.time_limit_s is not None:
            rule = "there is no scheduler to enforce it"
            found.append(Problem("--time", rule, "leave it out", f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        """Render one ssh command per machine."""
        members = [
            Member(machine.name, over_ssh(self.ssh, machine.name, self._on_machine(job, machine)))
            for machine in self._machines()[: job.max_nodes]
        ]
        return Rendered(FILE, Members(tuple(members), job.grace_s).text())

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - it is in the directory
        """Copy the code if requested, check all machines, then start."""
        names = [machine.name for machine in self._machines()[: job.max_nodes]]
        if self.sync:
            copy_code(names, self.ssh, job.working_dir)
        check_machines(names, self.ssh, job, self._interpreter)
        return coordinated.start(job)

    def _machines(self) -> tuple[SshMachine, ...]:
        if self.hosts is None:
            remedy = "--hosts FILE, one machine per line"
            raise ConfigError([Problem("--hosts", "not given", remedy, has_value=False)])
        return read_hosts(Path(self.hosts))

    @property
    def _interpreter(self) -> str:
        return self.python or sys.executable

    def _on_machine(self, job: Job, machine: SshMachine) -> str:
        """Return the shell command for a machine, with its address for the other machines."""
        words = with_stdin_watchdog(job, self._interpreter, f"--local-addr={machine.reached_at}")
        return f"cd {shlex.quote(job.working_dir)} && exec {shlex.join(words)}"
