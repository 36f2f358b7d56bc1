"""Typical mistakes, as changes to the solution, and the hint that each must get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.learn.exercises import exercise_named

_FOLDER = Path(__file__).parent / "wrong"


@dataclass(frozen=True)
class WrongAttempt:
    """One mistake."""

    exercise: str
    mistake: str
    hint: str
    edits: tuple[tuple[str, str], ...]
    """What in the solution is replaced by what."""

    def write(self, folder: Path) -> Path:
        text = exercise_named(self.exercise).solution.read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} is not there once"
            text = text.replace(old, new)
        file = folder / f"template_{self.exercise}.py"
        file.write_text(text)
        return file

    @property
    def name(self) -> str:
        return f"{self.exercise}: {self.mistake}"


def _attempts() -> list[WrongAttempt]:
    found = []
    for file in sorted(_FOLDER.glob("*.yaml")):
        phase: dict[str, list[dict[str, Any]]] = yaml.safe_load(file.read_text())
        for exercise, rows in phase.items():
            for row in rows:
                edits = tuple((edit["old"], edit["new"]) for edit in row["edits"])
                found.append(WrongAttempt(exercise, row["mistake"], row["hint"], edits))
    return found


ATTEMPTS = _attempts()
