"""What only a job's owner may do: read its secrets, and stop or restart it."""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.files import write_whole
from drivetrain.core.redaction import is_secret

# Secrets among a job's variables are kept in a file that only its owner can read, nowhere else.
#
# What is passed to a scheduler, shown, or put on a command line contains their names at most. A
# shell can read the file: `. job.env`.

FILE = "job.env"
OWNERS_ONLY = 0o600

Variables = tuple[tuple[str, str], ...]


def split_secrets(variables: Sequence[tuple[str, str]]) -> tuple[Variables, Variables]:
    """Split variables into ordinary ones and those that look like secrets."""
    secrets = tuple(each for each in variables if is_secret(*each))
    return tuple(each for each in variables if each not in secrets), secrets


def write_secrets(run_dir: Path, secrets: Variables) -> None:
    """Write them next to the job, replacing those of an earlier submission."""
    if not secrets:
        (run_dir / FILE).unlink(missing_ok=True)
        return
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets)
    write_whole(run_dir / FILE, lines, mode=OWNERS_ONLY)


def read_secrets(run_dir: Path) -> dict[str, str]:
    """Read what `write_secrets` wrote; empty if there is no file."""
    try:
        words = shlex.split((run_dir / FILE).read_text())
    except FileNotFoundError:
        return {}
    pairs = [word.partition("=") for word in words if word != "export"]
    return {name: value for name, _, value in pairs}


# The check before a job is stopped or resumed according to files in its directory.
#
# `resume` runs the script, the interpreter and the ssh command that job.json names, and `stop` ends
# the job that it names. That is safe only for jobs that this user has submitted.

_REMEDY = "review it, then add --trust if its commands are safe to run"


def check_own(path: Path) -> None:
    """Raise ConfigError unless this user owns the file and nobody else can write to it."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        rule = f"{path.name} is not a file"
    elif facts.st_uid != os.geteuid():
        rule = f"{path.name} belongs to {_name(facts.st_uid)}, and its commands would be run"
    elif facts.st_mode & 0o022:
        rule = f"{path.name} can be written by others, and its commands would be run"
    else:
        return
    raise ConfigError([Problem("RUN", rule, _REMEDY, str(path.parent))])


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
