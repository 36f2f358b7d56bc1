"""What is a job owner's alone: its secrets, and the right to stop or restart it."""

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

# Secrets among a job's variables: kept in a file that only its owner reads, and nowhere else.
#
# What a scheduler is handed, what is shown and what stands on a command line has their names at
# most. The file is one a shell can read: `. job.env`.

FILE = "job.env"
OWNERS_ONLY = 0o600

Variables = tuple[tuple[str, str], ...]


def split_secrets(variables: Sequence[tuple[str, str]]) -> tuple[Variables, Variables]:
    """Those that may be seen, and those that look like secrets."""
    secrets = tuple(each for each in variables if is_secret(*each))
    return tuple(each for each in variables if each not in secrets), secrets


def write_secrets(run_dir: Path, secrets: Variables) -> None:
    """Keep them beside the job; what an earlier submission kept is replaced."""
    if not secrets:
        (run_dir / FILE).unlink(missing_ok=True)
        return
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets)
    write_whole(run_dir / FILE, lines, mode=OWNERS_ONLY)


def read_secrets(run_dir: Path) -> dict[str, str]:
    """What `write` kept; empty when it was nothing."""
    try:
        words = shlex.split((run_dir / FILE).read_text())
    except FileNotFoundError:
        return {}
    pairs = [word.partition("=") for word in words if word != "export"]
    return {name: value for name, _, value in pairs}


# Whose words are these? Before a job is stopped or started again by what its directory says.
#
# `resume` runs the script, the interpreter and the ssh command that job.json names, and `stop` ends
# the job that it names. That is right for what this user has submitted, and for nothing else.

_REMEDY = "read it, and add --trust if you would have typed what it says"


def check_own(path: Path) -> None:
    """ConfigError unless the file is this user's, and nobody else can have written it."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        rule = f"{path.name} is not a file"
    elif facts.st_uid != os.geteuid():
        rule = f"{path.name} belongs to {_name(facts.st_uid)}, and what it names would be run"
    elif facts.st_mode & 0o022:
        rule = f"{path.name} can be written by others, and what it names would be run"
    else:
        return
    raise ConfigError([Problem("RUN", rule, _REMEDY, str(path.parent))])


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
