"""`drivetrain learn puzzle`: the named command shows each bug, and nothing once it is fixed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.learn import puzzles
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.puzzles import Puzzle, puzzle_named
from tests.learn.playing import play

_ALL = puzzles.puzzles()
_NAMES = [puzzle.name for puzzle in _ALL]
_KINDS = {
    "missing all-reduce",
    "wrong scaling",
    "swapped shard",
    "deadlock",
    "drifted replica",
    "leaked memory",
    "stalled data worker",
}


def _started(puzzle: Puzzle, path: Path) -> LearnerFolder:
    puzzles.start_puzzle(puzzle, path, lambda _: None)
    return LearnerFolder.around(path)


def _answer(puzzle: Puzzle, number: int, folder: LearnerFolder) -> tuple[bool, str]:
    said: list[str] = []
    return puzzles.check_line(puzzle, number, folder, said.append), "\n".join(said)


def test_there_is_one_of_each_kind() -> None:
    assert {puzzle.kind for puzzle in _ALL} == _KINDS
    assert len(_ALL) == len(_KINDS)


@pytest.mark.parametrize("puzzle", _ALL, ids=_NAMES)
def test_material_is_complete(puzzle: Puzzle) -> None:
    assert 1 <= len(puzzle.hints) <= 2
    assert all(len(text.split()) >= 15 for text in (puzzle.symptom, puzzle.explanation))
    assert all(puzzle.file in command or "diagnose" in command for command in puzzle.commands)
    compile(puzzle.fixed, puzzle.file, "exec")
    stripped = [line.strip() for line in puzzle.text.splitlines()]
    assert all(stripped.count(line) == 1 for line in puzzle.near), puzzle.name
    # neither the name nor what is told beforehand gives the kind away
    assert puzzle.kind not in f"{puzzle.name} {puzzle.title} {puzzle.symptom} {puzzle.text}"


@pytest.mark.parametrize("puzzle", _ALL, ids=_NAMES)
def test_the_bug_is_one_line_and_no_other_is_accepted(puzzle: Puzzle, tmp_path: Path) -> None:
    folder = _started(puzzle, tmp_path)
    (bug,) = puzzle.lines
    for number in range(1, len(puzzle.text.splitlines()) + 1):
        is_right, said = _answer(puzzle, number, folder)
        assert is_right == (number == bug), said
        assert (puzzle.kind in said) == is_right
    assert puzzles.state_of(puzzle, folder).is_passed


def test_a_line_that_is_often_taken_for_it_gets_an_answer_of_its_own(tmp_path: Path) -> None:
    puzzle = puzzle_named("letters")
    folder = _started(puzzle, tmp_path)
    (bug,) = puzzle.lines
    is_right, said = _answer(puzzle, bug + 1, folder)
    assert not is_right
    assert "Why did the other not get here?" in said


def test_a_learner_may_add_lines_and_put_it_right(tmp_path: Path) -> None:
    puzzle = puzzle_named("scans")
    folder = _started(puzzle, tmp_path)
    file = tmp_path / puzzle.file
    (bug,) = puzzle.lines
    file.write_text(f"import sys\nprint(sys.argv)\n{puzzle.fixed}")
    assert _answer(puzzle, bug + 2, folder)[0]
    for number in (1, bug, bug + 1, bug + 3):
        assert not _answer(puzzle, number, folder)[0]


def test_hints_come_one_at_a_time_and_a_solution_after_a_try(tmp_path: Path) -> None:
    puzzle = puzzle_named("tides")
    folder = _started(puzzle, tmp_path)
    said: list[str] = []
    for _ in range(3):
        puzzles.give_hint(puzzle, folder, said.append)
    assert "1 more: drivetrain learn puzzle hint tides" in said
    assert "this was the last hint" in said
    assert said.count("(no more hints; starting again)") == 1
    with pytest.raises(ConfigError, match="after a try"):
        puzzles.give_solution(puzzle, folder, said.append)
    _answer(puzzle, 1, folder)
    puzzles.give_solution(puzzle, folder, said.append)
    assert (tmp_path / "solutions" / puzzle.file).read_text() == puzzle.fixed
    assert "  + part = rank" in said


def test_what_is_not_there_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose: spectra"):
        puzzle_named("nothing")
    folder = _started(_ALL[0], tmp_path)
    with pytest.raises(ConfigError, match="has no such line"):
        _answer(_ALL[0], 1000, folder)
    with pytest.raises(ConfigError, match="puzzle start prices"):
        _answer(puzzle_named("prices"), 1, folder)


def test_a_second_start_overwrites_nothing(tmp_path: Path) -> None:
    folder = _started(_ALL[0], tmp_path)
    file = folder.path / _ALL[0].file
    file.write_text("mine")
    _started(_ALL[0], tmp_path)
    assert file.read_text() == "mine"


def test_found_ones_are_counted(tmp_path: Path) -> None:
    folder = _started(_ALL[0], tmp_path)
    said: list[str] = []
    (bug,) = _ALL[0].lines
    _answer(_ALL[0], bug, folder)
    _answer(_ALL[0], 1, folder)  # a wrong one afterwards takes nothing away
    puzzles.tell_puzzles(folder, said.append)
    assert said[0] == f"puzzles   1 of {len(_ALL)} found"
    assert f"  [✓] {_ALL[0].name:22s} 2 tries" in said


def test_in_the_terminal(tmp_path: Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "drivetrain", "learn", "puzzle", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert "drivetrain diagnose runs/grains" in run("start", "grains").stdout
    assert run("check", "grains", "1").returncode == 1
    (bug,) = puzzle_named("grains").lines
    found = run("check", "grains", str(bug))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "stalled data worker" in found.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("puzzle", _ALL, ids=_NAMES)
def test_the_command_shows_the_bug_and_nothing_once_it_is_fixed(
    puzzle: Puzzle, tmp_path: Path
) -> None:
    broken = play(puzzle, tmp_path / "broken", is_fixed=False)
    assert broken.codes[0] != 0, broken.said
    assert broken.shows(puzzle), broken.said
    fixed = play(puzzle, tmp_path / "fixed", is_fixed=True)
    assert fixed.codes[0] == 0, fixed.said
    assert not fixed.shows(puzzle), fixed.said
