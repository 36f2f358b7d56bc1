"""What a check says: rows, one at a time, so that what is done is kept when the rest is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PASS, FAIL, SKIPPED, NOT_RUN = "PASS", "FAIL", "skipped", "not run"


@dataclass(frozen=True)
class Row:
    """One thing that was looked at."""

    name: str
    state: str
    figure: str = ""
    """What was measured, or why nothing was."""
    text: str = ""
    """Markdown for below the table: what is too long for a cell."""


@dataclass(frozen=True)
class Result:
    """One check."""

    title: str
    rows: Sequence[Row]
    seconds: float = 0.0

    @property
    def state(self) -> str:
        """The worst of its rows'; a check that says nothing has failed."""
        states = {row.state for row in self.rows}
        return next((s for s in (FAIL, NOT_RUN, PASS, SKIPPED) if s in states), FAIL)


def judged(name: str, is_good: bool, figure: str, text: str = "") -> Row:
    return Row(name, PASS if is_good else FAIL, figure, text)


def append_row(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]
