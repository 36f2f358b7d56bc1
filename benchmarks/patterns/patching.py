"""Changes to other people's scripts, kept without a line of theirs: `diff -n`, below the digest of
the file they belong to. Lines that go are numbers; only lines that come are written out. Pure.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).with_name("patches")


@dataclass(frozen=True)
class Patch:
    """`source` names the file, for people."""

    sha256: str
    source: str
    commands: tuple[tuple[str, int, tuple[str, ...]], ...]
    """("d", first line, as many empty ones as go) or ("a", after this line, those that come)."""

    @property
    def counts(self) -> tuple[int, int]:
        """Lines that go, and lines that come."""
        sizes = [(kind, len(lines)) for kind, _, lines in self.commands]
        return sum(n for kind, n in sizes if kind == "d"), sum(
            n for kind, n in sizes if kind == "a"
        )

    def apply(self, original: str) -> str:
        """ValueError for any other file than the one it was made for."""
        if hashlib.sha256(original.encode()).hexdigest() != self.sha256:
            raise ValueError(f"this is not the {self.source} that the change was made for")
        lines = original.splitlines(keepends=True)
        result: list[str] = []
        done = 0
        for kind, number, changed in self.commands:
            upto = number - 1 if kind == "d" else number
            result += lines[done:upto]
            done = max(done, upto)
            if kind == "d":
                done += len(changed)
            else:
                result += changed
        return "".join(result + lines[done:])


def read(name: str) -> Patch:
    head, *rest = (PATCHES / f"{name}.rcs").read_text().splitlines(keepends=True)
    sha256, _, source = head.strip().partition(" ")
    commands: list[tuple[str, int, tuple[str, ...]]] = []
    while rest:
        found = re.fullmatch(r"([ad])(\d+) (\d+)\n", rest.pop(0))
        if found is None:
            raise ValueError(f"{name}: neither a nor d")
        kind, number, count = found[1], int(found[2]), int(found[3])
        changed = ("",) * count if kind == "d" else tuple(rest[:count])
        rest = rest if kind == "d" else rest[count:]
        commands.append((kind, number, changed))
    return Patch(sha256, source, tuple(commands))
