"""The learner's folder: templates to fill in, and the progress, in `.learn.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn.exercises import COURSE, PHASES, Exercise, Phase, exercises_of

_STATE = ".learn.json"


@dataclass
class ExerciseState:
    """What happened with one exercise so far."""

    num_tries: int = 0
    is_passed: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    """Best scores so far, by quantity: 1.0 is the limit."""
    last_hint: str = ""
    """What the last check found."""
    checked_at_s: float = 0.0
    hints_given: list[str] = field(default_factory=list)


class LearnerFolder:
    """The folder in which a learner works."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def around(cls, here: Path) -> LearnerFolder:
        """Find the folder here or above: commands also work inside a phase's folder."""
        for path in (here, *here.parents):
            if (path / _STATE).is_file():
                return cls(path)
        rule = "no exercises have been started here"
        raise ConfigError(
            [Problem("folder", rule, "drivetrain learn start 1 begins with phase 1", str(here))]
        )

    @classmethod
    def if_any(cls, here: Path) -> LearnerFolder | None:
        """Return None if there is none, for commands that also work without one."""
        with suppress(ConfigError):
            return cls.around(here)
        return None

    def start(self, phase: Phase) -> list[Path]:
        """Copy a phase's files; return those that were written."""
        guidelines = COURSE / phase.folder / "guidelines.md"
        files = [
            (guidelines, f"{phase.folder}/guidelines.md"),
            *((each.template, each.file) for each in exercises_of(phase)),
        ]
        if phase in PHASES:  # labs are checked one by one: each starts a cluster
            files.append((COURSE / "test_phase.py", f"test_phase{phase.number}.py"))
        return self.copy(files)

    def copy(self, files: Sequence[tuple[Path, str]]) -> list[Path]:
        """Copy files that do not exist yet; the learner's files are never overwritten."""
        written = []
        for original, name in files:
            target = self.path / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(original.read_text())
                written.append(target)
        if not (self.path / _STATE).exists():
            self._save({})
        return written

    def file_of(self, exercise: Exercise) -> Path:
        """Return the path of the learner's file; ConfigError if it does not exist."""
        path = self.path / exercise.file
        if not path.is_file():
            remedy = f"copy the templates with drivetrain learn start {exercise.phase.number}"
            raise ConfigError([Problem("exercise", "file not found", remedy, exercise.file)])
        return path.resolve()

    def has_started(self, phase: Phase) -> bool:
        return (self.path / phase.folder).is_dir()

    @property
    def started(self) -> list[Phase]:
        return [phase for phase in PHASES if self.has_started(phase)]

    def state_of(self, exercise: Exercise) -> ExerciseState:
        return self.state_named(exercise.name)

    def remember(self, exercise: Exercise, state: ExerciseState) -> None:
        self.remember_named(exercise.name, state)

    def state_named(self, name: str) -> ExerciseState:
        """Return the state of an exercise, or of something else that is scored."""
        return self._states().get(name, ExerciseState())

    def remember_named(self, name: str, state: ExerciseState) -> None:
        self._save({**self._states(), name: state})

    def _states(self) -> dict[str, ExerciseState]:
        file = self.path / _STATE
        try:
            read = json.loads(file.read_text())
            return {name: ExerciseState(**values) for name, values in read.items()}
        except (ValueError, TypeError, AttributeError) as error:
            remedy = "delete it; your files stay, and `drivetrain learn check` recreates it"
            raise ConfigError(
                [Problem(str(file), "is damaged", remedy, has_value=False)]
            ) from error

    def _save(self, states: dict[str, ExerciseState]) -> None:
        values = {name: asdict(state) for name, state in states.items()}
        fresh = self.path / f"{_STATE}.new"
        fresh.write_text(json.dumps(values, indent=1) + "\n")
        os.replace(fresh, self.path / _STATE)
