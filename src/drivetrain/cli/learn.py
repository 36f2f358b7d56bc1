"""`drivetrain learn`."""

from __future__ import annotations

import signal
from pathlib import Path

from drivetrain.cli.say import say
from drivetrain.learn import completion, puzzles, quiz, session
from drivetrain.learn.exercises import Exercise, exercise_named, exercises_of, phase_numbered
from drivetrain.learn.folder import LearnerFolder


def show_list() -> None:
    session.list_exercises(say)


def start_phase(phase: str) -> None:
    session.start(phase_numbered(phase), Path.cwd(), say)


def check_exercises(name: str, phase: str, here: Path | None = None) -> int:
    """Check one exercise, a whole phase, or the next that has not passed; return the exit code."""
    folder = LearnerFolder.around(here or Path.cwd())
    asked = exercises_of(phase_numbered(phase)) if phase else [_asked(name, folder)]
    try:
        return 0 if session.check(asked, folder, say) else 1
    except KeyboardInterrupt:
        say("interrupted: this check does not count", err=True)
        return 128 + signal.SIGINT


def show_hint(name: str) -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.give_hint(_asked(name, folder), folder, say)


def write_solution(name: str) -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.give_solution(_asked(name, folder), folder, say)


def show_progress() -> None:
    folder = LearnerFolder.around(Path.cwd())
    session.tell_progress(folder, say)
    say("")
    puzzles.tell_puzzles(folder, say)
    say("")
    quiz.tell_score(folder, say)
    say("")
    completion.tell_completion(folder, say)


def mark_done(name: str) -> None:
    completion.mark_done(name, LearnerFolder.around(Path.cwd()), say)


def ask_quiz(number: int | None) -> None:
    quiz.ask_questions(number, LearnerFolder.if_any(Path.cwd()), input, say)


def _asked(name: str, folder: LearnerFolder) -> Exercise:
    return exercise_named(name) if name else session.exercise_at_hand(folder)
