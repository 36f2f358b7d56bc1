"""What a coordinator and its client share: the members of a job, and the coordinator's lock."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from drivetrain.core import locks
from drivetrain.core.bounded import read_yaml
from drivetrain.launch.job import Job
from drivetrain.launch.yaml_text import yaml_text

# Members: the commands of a job that is started host by host, as values and as a file.
#
#     members:
#       - host: node-a
#         command: [ssh, -T, node-a, "cd /code && python -m …stdin_watchdog …"]
#
# The coordinator does what this file says and nothing else; it is what `--dry-run` prints.

FILE = "job.yaml"
LOGS = "logs"
FROM_STDIN = "--variables-on-stdin"
"""To the watchdog: its first line is a JSON object of variables that no command line may show."""


@dataclass(frozen=True)
class Member:
    """One host's part of a job."""

    host: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Members:
    """All of them, and how long they have to save when asked to stop."""

    members: tuple[Member, ...]
    grace_s: float

    def text(self) -> str:
        """The file, for people too: a command is one line of shell."""
        members = [{"host": m.host, "command": shlex.join(m.command)} for m in self.members]
        seconds = int(self.grace_s) if self.grace_s == int(self.grace_s) else self.grace_s
        return yaml_text({"grace_s": seconds, "members": members}, width=10**6)


def read_members(path: Path) -> Members:
    """What `Members.text` wrote."""
    content = read_yaml(path)
    found = [Member(m["host"], tuple(shlex.split(m["command"]))) for m in content["members"]]
    return Members(tuple(found), float(content["grace_s"]))


def with_stdin_watchdog(job: Job, python: str, *more_flags: str) -> list[str]:
    """What runs on a host, as one command line's words; variables first, for `env`."""
    variables = [f"{name}={value}" for name, value in job.environment]
    argv = job.node_argv(*more_flags)
    watchdog = [python, "-m", "drivetrain.launch.coordinator.stdin_watchdog"]
    watchdog += [FROM_STDIN] if job.secrets else []
    return [*(["env", *variables] if variables else []), *watchdog, *argv]


# The lock of a run's coordinator: whoever can take it knows that none is at work.
#
# The system lets it go when its holder dies, however that comes about, so nobody has to guess from
# a process id.

_FILE = "conductor.lock"


def hold_coordinator_lock(run_dir: Path) -> IO[str] | None:
    """Take it, for as long as the file stays open; None while somebody has it."""
    return locks.hold(run_dir / _FILE)


def coordinator_lock_holder(run_dir: Path) -> tuple[str, int] | None:
    """The host and process id of the coordinator at work; None when there is none."""
    return locks.holder(run_dir / _FILE)
