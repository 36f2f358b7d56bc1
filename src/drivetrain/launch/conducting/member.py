"""Members: the commands of a job that is started host by host, as values and as a file.

    members:
      - host: node-a
        command: [ssh, -T, node-a, "cd /code && python -m drivetrain.launch.conducting.leash …"]

The conductor does what this file says and nothing else; it is what `--dry-run` prints.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from drivetrain.core.bounded import read_yaml
from drivetrain.launch.job import Job

FILE = "job.yaml"
LOGS = "logs"


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
        lines = [f"grace_s: {self.grace_s:g}", "members:"]
        for member in self.members:
            command = yaml.safe_dump(shlex.join(member.command), width=10**6).splitlines()[0]
            lines += [f"- host: {member.host}", f"  command: {command}"]
        return "\n".join(lines) + "\n"


def read_members(path: Path) -> Members:
    """What `Members.text` wrote."""
    content = read_yaml(path)
    found = [Member(m["host"], tuple(shlex.split(m["command"]))) for m in content["members"]]
    return Members(tuple(found), float(content["grace_s"]))


def on_leash(job: Job, python: str, *more_flags: str) -> list[str]:
    """What runs on a host, as one command line's words; variables first, for `env`."""
    variables = [f"{name}={value}" for name, value in job.environment]
    words = job.node_words(*more_flags)
    return [*(["env", *variables] if variables else []), *_leash(python), *words]


def _leash(python: str) -> Sequence[str]:
    return python, "-m", "drivetrain.launch.conducting.leash"
