"""The members of a job and the coordinator's lock, shared by the coordinator and its client."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from drivetrain.core import locks
from drivetrain.core.bounded import read_yaml
from drivetrain.launch.job import Job
from drivetrain.launch.yaml_text import yaml_text

# Members: the commands of a job that is started host by host, and their file.
#
#     members:
#       - host: node-a
#         command: [ssh, -T, node-a, "cd /code && python -m …stdin_watchdog …"]
#
# The coordinator runs exactly these commands; `--dry-run` prints this file.

FILE = "job.yaml"
LOGS = "logs"
FROM_STDIN = "--variables-on-stdin"
"""Tells the watchdog that its first line is a JSON object of secret environment variables."""


@dataclass(frozen=True)
class Member:
    """One host's part of a job."""

    host: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Members:
    """All members of a job, and how long they may take to save when asked to stop."""

    members: tuple[Member, ...]
    grace_s: float

    def text(self) -> str:
        """Return the file's text; each command is one readable line of shell."""
        members = [{"host": m.host, "command": shlex.join(m.command)} for m in self.members]
        seconds = int(self.grace_s) if self.grace_s == int(self.grace_s) else self.grace_s
        return yaml_text({"grace_s": seconds, "members": members}, width=10**6)


def read_members(path: Path) -> Members:
    """Read what `Members.text` wrote."""
    content = read_yaml(path)
    found = [Member(m["host"], tuple(shlex.split(m["command"]))) for m in content["members"]]
    return Members(tuple(found), float(content["grace_s"]))


def with_stdin_watchdog(job: Job, python: str, *more_flags: str) -> list[str]:
    """Return the command line for a host; it starts with `env` if there are variables."""
    variables = [f"{name}={value}" for name, value in job.environment]
    argv = job.node_argv(*more_flags)
    watchdog = [python, "-m", "drivetrain.launch.coordinator.stdin_watchdog"]
    watchdog += [FROM_STDIN] if job.secrets else []
    return [*(["env", *variables] if variables else []), *watchdog, *argv]


# The lock of a run's coordinator: a process that can take it knows that no coordinator is running.
#
# The system releases it when its holder dies, for whatever reason, which is more reliable than a
# process id.

_FILE = "conductor.lock"


def hold_coordinator_lock(run_dir: Path) -> IO[str] | None:
    """Take the lock, held while the file stays open; None if another process holds it."""
    return locks.hold(run_dir / _FILE)


def coordinator_lock_holder(run_dir: Path) -> tuple[str, int] | None:
    """Return the host and process id of the running coordinator; None if there is none."""
    return locks.holder(run_dir / _FILE)
