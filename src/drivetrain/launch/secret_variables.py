"""Secrets among a job's variables: kept in a file that only its owner reads, and nowhere else.

What a scheduler is handed, what is shown and what stands on a command line has their names at most.
The file is one a shell can read: `. job.env`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.files import write_whole
from drivetrain.core.redaction import is_secret

FILE = "job.env"
OWNERS_ONLY = 0o600

Variables = tuple[tuple[str, str], ...]


def split(variables: Sequence[tuple[str, str]]) -> tuple[Variables, Variables]:
    """Those that may be seen, and those that look like secrets."""
    secrets = tuple(each for each in variables if is_secret(*each))
    return tuple(each for each in variables if each not in secrets), secrets


def write(run_dir: Path, secrets: Variables) -> None:
    """Keep them beside the job; what an earlier submission kept is replaced."""
    if not secrets:
        (run_dir / FILE).unlink(missing_ok=True)
        return
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets)
    write_whole(run_dir / FILE, lines, mode=OWNERS_ONLY)


def read(run_dir: Path) -> dict[str, str]:
    """What `write` kept; empty when it was nothing."""
    try:
        words = shlex.split((run_dir / FILE).read_text())
    except FileNotFoundError:
        return {}
    pairs = [word.partition("=") for word in words if word != "export"]
    return {name: value for name, _, value in pairs}
