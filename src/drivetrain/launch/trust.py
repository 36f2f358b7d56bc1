"""Whose words are these? Before a job is stopped or started again by what its directory says.

`resume` runs the script, the interpreter and the ssh command that job.json names, and `stop` ends
the job that it names. That is right for what this user has submitted, and for nothing else.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem

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
