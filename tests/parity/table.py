"""Every mutant, and what the certificate says of it: python -m tests.parity.table FOLDER"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain.verify.parity.compare import Divergence, Parting
from tests.parity.mutants import MUTANTS, Expected
from tests.parity.running import HEALTHY, Seen, see_layout, see_reference, verdict

HEALTHY_LAYOUTS = ("ddp:2", "ddp:3", "ddp:4", "fsdp:2", "fsdp:4", "hsdp:2x2", "tp+loss:2")


@dataclass(frozen=True)
class Row:
    """One run, healthy or not."""

    name: str
    bug: str
    layout: str
    parting: Parting | None
    divergence: Divergence | None

    @property
    def is_right(self) -> bool:
        """A mutant is found where it was planted; a healthy layout raises no alarm."""
        if self.name == HEALTHY:
            return not self.is_caught
        return found(self.divergence) == MUTANTS[self.name].expected

    @property
    def is_caught(self) -> bool:
        """Whether the certificate would fail."""
        return self.parting is not None or self.divergence is not None


def found(divergence: Divergence | None) -> Expected | None:
    """What was found, as it would have been expected."""
    if divergence is None:
        return None
    return Expected(divergence.stage, divergence.place, divergence.step, divergence.ranks)


def rows_of(reference: Seen, folder: Path, layout: str, names: Iterable[str]) -> list[Row]:
    seen = see_layout(folder / layout.replace(":", "-"), layout, tuple(names))
    return [Row(name, _bug(name), layout, *verdict(reference, here)) for name, here in seen.items()]


def planted_in(layout: str) -> list[str]:
    return [name for name, mutant in MUTANTS.items() if mutant.layout == layout]


def all_rows(folder: Path) -> list[Row]:
    reference = see_reference(folder)
    rows = []
    for layout in HEALTHY_LAYOUTS:
        rows += rows_of(reference, folder, layout, [HEALTHY, *planted_in(layout)])
    return sorted(rows, key=lambda row: row.name == HEALTHY)


def make_table(rows: list[Row]) -> str:
    lines = ["| planted bug | layout | found by | first difference |", "| --- | --- | --- | --- |"]
    for row in rows:
        parting = "the trace alone" if row.is_caught else "nothing parts"
        if row.parting is not None:
            parting = f"{row.parting.what} at step {row.parting.step}"
        where = "" if row.divergence is None else str(row.divergence)
        if not row.is_right:
            where += " (WRONG)"
        lines.append(f"| {row.bug} | {row.layout} | {parting} | {where} |")
    mutants = [row for row in rows if row.name != HEALTHY]
    healthy = [row for row in rows if row.name == HEALTHY]
    caught, named = (
        sum(row.is_caught for row in mutants),
        sum(row.is_right for row in mutants),
    )
    alarms = sum(row.is_caught for row in healthy)
    lines += [
        "",
        f"{caught} of {len(mutants)} planted bugs are caught, {named} of them with the right step, "
        f"stage, place and ranks; {alarms} false alarms in {len(healthy)} healthy layouts.",
    ]
    return "\n".join(lines) + "\n"


def _bug(name: str) -> str:
    if name == HEALTHY:
        return "none"
    return " ".join((MUTANTS[name].__doc__ or name).rstrip(".").split())


def main() -> None:
    output = Path(sys.argv[1])
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = all_rows(Path(folder))
    table = make_table(rows)
    (output / "table.md").write_text(table)
    raw = [{**asdict(row), "is_right": row.is_right} for row in rows]
    (output / "rows.json").write_text(json.dumps(raw, indent=1) + "\n")
    print(table)
    sys.exit(0 if all(row.is_right for row in rows) else 1)


if __name__ == "__main__":
    main()
