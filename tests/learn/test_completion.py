"""The completion list: what counts, and that everything together is 100%."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drivetrain.core.errors import ConfigError
from drivetrain.learn import quiz
from drivetrain.learn.completion import (
    BY_HAND,
    completion,
    mark_done,
    percent,
    tell_completion,
)
from drivetrain.learn.exercises import EXERCISES, LABS, PHASES
from drivetrain.learn.folder import ExerciseState, LearnerFolder
from drivetrain.learn.puzzles import check_line, puzzles, start_puzzle
from tests.learn.course import RESULTS

LAB_NAMES = [lab.name for lab in LABS]


def _quiet(_: str) -> None:
    pass


def _folder(path: Path) -> LearnerFolder:
    folder = LearnerFolder(path)
    for phase in PHASES:
        folder.start(phase)
    return folder


def _recorded_passes() -> list[str]:
    """Exercises whose solution has passed its check, as `make course` wrote it down."""
    results = yaml.safe_load(RESULTS.read_text())
    return [
        exercise.name
        for exercise in EXERCISES
        for row in results.get(exercise.name, {"rows": []})["rows"]
        if (row["file"], row["found"]) == ("solution", "passes")
    ]


def test_nothing_is_done_in_a_new_folder(tmp_path: Path) -> None:
    items = completion(_folder(tmp_path))
    assert percent(items) == 0
    assert not any(item.is_done for item in items)


def test_all_solutions_together_are_the_whole_course(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    for name in _recorded_passes():
        folder.remember_named(name, ExerciseState(1, is_passed=True))
    for puzzle in puzzles():
        start_puzzle(puzzle, tmp_path, _quiet)
        assert check_line(puzzle, min(puzzle.lines), folder, _quiet)
    answers = iter([question.answer for question in quiz.questions()])
    quiz.ask_questions(None, folder, lambda _: next(answers), _quiet)
    for name in LAB_NAMES:  # their own tests say that their solutions pass
        folder.remember_named(name, ExerciseState(1, is_passed=True))
    assert percent(completion(folder)) < 100
    for name in BY_HAND:
        mark_done(name, folder, _quiet)
    said: list[str] = []
    tell_completion(folder, said.append)
    assert said[-1] == "the course: 100% done"
    assert all(line.startswith("  [✓]") for line in said[:-1])


@pytest.mark.parametrize("missing", [EXERCISES[-1].name, LAB_NAMES[0], BY_HAND[0], BY_HAND[-1]])
def test_without_one_thing_it_is_less(missing: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    everything = [exercise.name for exercise in EXERCISES]
    everything += [f"puzzle {puzzle.name}" for puzzle in puzzles()]
    for name in [*everything, *LAB_NAMES, *BY_HAND]:
        folder.remember_named(name, ExerciseState(1, is_passed=name != missing))
    right = {str(number): 1.0 for number in range(1, len(quiz.questions()) + 1)}
    folder.remember_named("quiz", ExerciseState(25, scores=right))
    items = completion(folder)
    assert percent(items) < 100
    assert sum(not item.is_done for item in items) == 1


def test_what_a_check_decides_is_not_ticked_off_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be marked as done by hand"):
        mark_done("ring_allreduce", _folder(tmp_path), _quiet)
