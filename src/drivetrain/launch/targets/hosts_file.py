"""The hosts file: one machine per line, as MPI and DeepSpeed know it.

# name as ssh knows it, and optionally its number of processes and the address peers use
node-a slots=8
node-b slots=8 address=10.0.0.2
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.bounded import read_text
from drivetrain.core.errors import ConfigError, DamagedRun, Problem

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*")
"""Nothing that ssh would take for an option, or a shell for anything."""


@dataclass(frozen=True)
class Machine:
    """One line."""

    name: str
    slots: int | None = None
    address: str | None = None

    @property
    def reached_at(self) -> str:
        """Where the other machines find it: user@node-a is node-a."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[Machine, ...]:
    """Every machine of the file, or everything that is wrong with it."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError, DamagedRun) as error:
        reason = getattr(error, "strerror", None) or f"cannot be read ({error})"
        problem = Problem("--hosts", reason, "give a file", str(path))
        raise ConfigError([problem]) from None
    problems: list[Problem] = []
    machines = list(_machines(path, lines, problems))
    if not machines and not problems:
        problems.append(Problem("--hosts", "names no machine", "one per line", str(path)))
    for name in sorted({m.name for m in machines if [n.name for n in machines].count(m.name) > 1}):
        remedy = "one line per machine; slots=N says how many processes"
        problems.append(Problem(str(path), "named twice", remedy, name))
    if len({machine.slots for machine in machines}) > 1:
        rule = "every machine must have the same number of slots"
        counts = ", ".join(f"{m.name}: {m.slots or 'none given'}" for m in machines)
        problems.append(Problem(str(path), rule, "give each the same slots=N", counts))
    if problems:
        raise ConfigError(problems)
    return tuple(machines)


def _machines(path: Path, lines: list[str], problems: list[Problem]) -> Iterator[Machine]:
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
                remedy = "NAME or USER@NAME, as ssh knows it"
                problems.append(Problem(where, "not a machine's name", remedy, name))
        for key, value in values.items():
            shown = f"{key}={value}" if value else key
            problems.append(Problem(where, "not understood", "NAME slots=N address=A", shown))
        if slots is not None and (
            not (slots.isascii() and slots.isdigit() and len(slots) < 10) or int(slots) < 1
        ):
            problems.append(Problem(where, "slots must be a whole number from 1", "slots=8", slots))
            slots = None
        yield Machine(words[0], None if slots is None else int(slots), address)
