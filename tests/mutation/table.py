"""What came out: one row per mutant, a table per file, and every survivor with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

PLANTED = "planted: "
"""Stands before what was done by hand."""


@dataclass(frozen=True)
class Row:
    """One mutant, and what became of it."""

    name: str
    file: str
    line: int
    status: str
    by: str
    """The first test that failed."""
    seconds: float

    @classmethod
    def of(cls, mutant: Mutant, status: str, by: str, seconds: float) -> Row:
        return cls(mutant.name, mutant.file, mutant.line, status, by, seconds)

    @classmethod
    def from_json(cls, line: str) -> Row:
        return cls(**json.loads(line))

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def is_killed(self) -> bool:
        """One that never ends is noticed too."""
        return self.status in ("killed", "timed out")


def wilson(killed: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = 1.96, killed / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def write_tables(folder: Path, rows: Sequence[Row], counts: Mapping[str, int], seed: int) -> None:
    """table.md and survivors.md; reasons come from reasons.json, by the mutant's name."""
    path = folder / "reasons.json"
    reasons = json.loads(path.read_text()) if path.exists() else {}
    by_hand = [row for row in rows if PLANTED in row.name]
    drawn = [row for row in rows if PLANTED not in row.name]
    (folder / "table.md").write_text(_table(drawn, by_hand, counts, seed))
    (folder / "survivors.md").write_text(_survivors([*by_hand, *drawn], reasons))


def _table(
    drawn: Sequence[Row], by_hand: Sequence[Row], counts: Mapping[str, int], seed: int
) -> str:
    killed, total = sum(row.is_killed for row in drawn), len(drawn)
    low, high = wilson(killed, total)
    what = "all" if total == sum(counts.values()) else f"a sample (seed {seed}) of {total:,} of"
    lines = [
        f"{what} {sum(counts.values()):,} mutants; {killed:,} killed: {killed / total:.1%} "
        f"(95 % interval {low:.1%} to {high:.1%}).",
        f"Planted by hand: {sum(row.is_killed for row in by_hand)} of {len(by_hand)} killed.",
        "",
        "| file | mutants | tried | killed | of these timed out | survived | no test runs it |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file, count in counts.items():
        own = [row for row in drawn if row.file == file]
        status = [row.status for row in own]
        lines.append(
            f"| {file.removeprefix('src/drivetrain/')} | {count} | {len(own)} "
            f"| {sum(row.is_killed for row in own)} | {status.count('timed out')} "
            f"| {status.count('survived')} | {status.count('not run')} |"
        )
    return "\n".join(lines) + "\n"


def _survivors(rows: Sequence[Row], reasons: Mapping[str, str]) -> str:
    lines = ["| mutant | line | reason |", "| --- | ---: | --- |"]
    for row in rows:
        if not row.is_killed:
            reason = reasons.get(row.name, "no test runs it" if row.status == "not run" else "")
            name = row.name.removeprefix("src/drivetrain/").replace("|", "\\|")
            lines.append(f"| `{name}` | {row.line} | {reason} |")
    return "\n".join(lines) + "\n"
