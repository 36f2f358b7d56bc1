"""`drivetrain learn puzzle`; does not import torch, so that it starts fast."""

from __future__ import annotations

from pathlib import Path

from drivetrain.cli.say import say
from drivetrain.learn import puzzles
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.puzzles import puzzle_named


def show_list() -> None:
    puzzles.list_puzzles(LearnerFolder.if_any(Path.cwd()), say)


def start(name: str) -> None:
    folder = LearnerFolder.if_any(Path.cwd())
    here = Path.cwd() if folder is None else folder.path
    if here != Path.cwd():
        say(f"in {here}:")
    puzzles.start_puzzle(puzzle_named(name), here, say)


def check(name: str, line: int) -> int:

    folder = LearnerFolder.around(Path.cwd())
    return 0 if puzzles.check_line(puzzle_named(name), line, folder, say) else 1


def show_hint(name: str) -> None:
    puzzles.give_hint(puzzle_named(name), LearnerFolder.around(Path.cwd()), say)


def write_solution(name: str) -> None:
    puzzles.give_solution(puzzle_named(name), LearnerFolder.around(Path.cwd()), say)
