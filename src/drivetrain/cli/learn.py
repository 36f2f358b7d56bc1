"""`drivetrain learn`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from drivetrain.cli.say import say
from drivetrain.core.errors import ConfigError
from drivetrain.learn import completion, puzzles, quiz, session
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
    say("")
    puzzles.tell_puzzles(folder, say)
    say("")
    quiz.tell_score(folder, say)
    say("")
    completion.tell_completion(folder, say)


def mark_done(name: str) -> None:
    completion.mark_done(name, LearnerFolder.around(Path.cwd()), say)


def ask_quiz(number: int | None) -> None:
    quiz.ask_questions(number, _folder_if_any(), input, say)


def show_puzzles() -> None:
    puzzles.list_puzzles(_folder_if_any(), say)


def start_puzzle(name: str) -> None:
    folder = _folder_if_any()
    here = Path.cwd() if folder is None else folder.path
    puzzles.start_puzzle(puzzles.puzzle_named(name), here, say)


def check_puzzle(name: str, line: int) -> int:
    """The exit code."""
    folder = LearnerFolder.around(Path.cwd())
    return 0 if puzzles.check_line(puzzles.puzzle_named(name), line, folder, say) else 1


def show_puzzle_hint(name: str) -> None:
    puzzles.give_hint(puzzles.puzzle_named(name), LearnerFolder.around(Path.cwd()), say)


def write_puzzle_solution(name: str) -> None:
    puzzles.give_solution(puzzles.puzzle_named(name), LearnerFolder.around(Path.cwd()), say)


def _folder_if_any() -> LearnerFolder | None:
    """The quiz and the list of puzzles are for anyone, anywhere; then no score is kept."""
    with suppress(ConfigError):
        return LearnerFolder.around(Path.cwd())
    return None


def _asked(name: str, folder: LearnerFolder) -> Exercise:
    return exercise_named(name) if name else session.exercise_at_hand(folder)
