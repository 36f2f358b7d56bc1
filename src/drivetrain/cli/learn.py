"""`drivetrain learn`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from drivetrain.cli.say import say
from drivetrain.core.errors import ConfigError
from drivetrain.learn import quiz, session
from drivetrain.learn.exercises import Exercise, exercise_named, exercises_of, phase_numbered
from drivetrain.learn.folder import LearnerFolder


def show_list() -> None:
    session.list_exercises(say)


def start_phase(phase: str) -> None:
    session.start(phase_numbered(phase), Path.cwd(), say)


def check_exercises(name: str, phase: str, here: Path | None = None) -> int:
    """One, those of a phase, or the next that is not passed; the exit code."""
    folder = LearnerFolder.around(here or Path.cwd())
    asked = exercises_of(phase_numbered(phase)) if phase else [_asked(name, folder)]
    return 0 if session.check(asked, folder, say) else 1


def show_hint(name: str) -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.give_hint(_asked(name, folder), folder, say)


def write_solution(name: str) -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.give_solution(_asked(name, folder), folder, say)


def show_progress() -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.tell_progress(folder, say)
    quiz.tell_score(folder, say)


def ask_quiz(number: int | None) -> None:
    folder: LearnerFolder | None = None
    with suppress(ConfigError):  # the quiz is asked anywhere, and says that no score is kept
        folder = LearnerFolder.around(Path.cwd())
    quiz.ask_questions(number, folder, input, say)


def _asked(name: str, folder: LearnerFolder) -> Exercise:
    return exercise_named(name) if name else session.exercise_at_hand(folder)
