"""Every template, solution and wrong attempt through its check: `make course` writes the tables.

`python -m tests.learn.course NAME …` checks those exercises and puzzles only. What was found is
kept by name in benchmarks/results/course.yaml, from which docs/learn.md and the solutions' scores
are written.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.exercises import COURSE, EXERCISES, Exercise, exercise_named
from drivetrain.learn.puzzles import Puzzle, puzzles
from drivetrain.learn.verdict import Passed
from tests.learn.playing import play
from tests.learn.wrong_attempts import ATTEMPTS

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "learn.md"
RESULTS = _ROOT / "benchmarks" / "results" / "course.yaml"
_BEGIN, _END = "<!-- checked -->", "<!-- end of checked -->"
_PUZZLES = "puzzles"
"""Beside the exercises, in the results."""


@dataclass(frozen=True)
class Row:
    """One file through its check."""

    exercise: Exercise
    kind: str
    expected: str
    found: str
    took_s: float
    passed: Passed | None = None

    @property
    def is_right(self) -> bool:
        return self.found == self.expected


def checked(exercise: Exercise, file: Path, kind: str, expected: str) -> Row:
    begin_s = time.monotonic()
    passed, found = None, "passes"
    try:
        passed = exercise.check(file)
    except Shortcoming as shortcoming:
        found = shortcoming.hint
    return Row(exercise, kind, expected, found, time.monotonic() - begin_s, passed)


def rows_of(exercise: Exercise, folder: Path) -> Iterator[Row]:
    yield checked(exercise, exercise.solution, "solution", "passes")
    yield checked(exercise, exercise.template, "template", "todo")
    for attempt in ATTEMPTS:
        if attempt.exercise == exercise.name:
            yield checked(exercise, attempt.write(folder), attempt.mistake, attempt.hint)


def table(results: dict[str, Any]) -> str:
    wrong = [
        (name, row)
        for name, result in results.items()
        for row in result["rows"]
        if row["file"] not in ("solution", "template")
    ]
    right = sum(row["found"] == row["expected"] for _, row in wrong)
    lines = [
        f"{len(results)} solutions pass, {len(results)} templates fail, and {right} of {len(wrong)}"
        " wrong attempts get the hint that fits.",
        "",
        "| exercise | mistake | hint |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {row['file']} | {row['found']} |" for name, row in wrong]
    lines += ["", "| exercise | scored | solution |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {what} | {share:.0%} |"
        for name, result in results.items()
        for what, share in result["scores"].items()
    ]
    return "\n".join(lines)


def puzzle_table(results: dict[str, Any]) -> str:
    lines = [
        "Each puzzle's commands, run on the script with its bug and with the bug fixed:",
        "",
        "| puzzle | bug | command | with the bug | fixed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for puzzle in puzzles():
        found = results.get(puzzle.name)
        if found is not None:
            command = f"`{' '.join(takewhile(str.isalpha, puzzle.commands[-1].split()))}`"
            with_bug = f"shown ({found['took_s']:.0f} s)" if found["shown"] else "not shown"
            without = "shown" if found["shown_when_fixed"] else "not shown"
            lines.append(f"| {puzzle.name} | {puzzle.kind} | {command} | {with_bug} | {without} |")
    return "\n".join(lines)


def _results() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(RESULTS.read_text()) if RESULTS.exists() else {}
    return read


def keep(rows: list[Row]) -> None:
    """Into the results, and into the page."""
    results = _results()
    results[rows[0].exercise.name] = {
        "scores": {
            score.what: round(score.share, 4)
            for row in rows
            for score in (row.passed.scores if row.passed else ())
        },
        "rows": [
            {"file": r.kind, "expected": r.expected, "found": r.found, "took_s": round(r.took_s, 1)}
            for r in rows
        ],
    }
    write(results)


def write(results: dict[str, Any]) -> None:
    """The results; and the page, once there are some of every exercise."""
    RESULTS.write_text(yaml.safe_dump(results, allow_unicode=True, sort_keys=False))
    in_order = {each.name: results[each.name] for each in EXERCISES if each.name in results}
    if len(in_order) == len(EXERCISES):
        scores = {name: each["scores"] for name, each in in_order.items() if each["scores"]}
        note = "# What the solutions reach of each limit; written by `make course`.\n"
        (COURSE / "scores.yaml").write_text(note + yaml.safe_dump(scores, allow_unicode=True))
        tables = f"{table(in_order)}\n\n{puzzle_table(results.get(_PUZZLES, {}))}"
        before, rest = PAGE.read_text().split(_BEGIN)
        after = rest.split(_END)[1]
        PAGE.write_text(f"{before}{_BEGIN}\n\n{tables}\n\n{_END}{after}")


def check_puzzle(puzzle: Puzzle, folder: Path) -> bool:
    """Whether its commands show the bug, and nothing once it is fixed; the result is kept if so."""
    broken = play(puzzle, folder / "broken", is_fixed=False)
    fixed = play(puzzle, folder / "fixed", is_fixed=True)
    found = {
        "shown": broken.shows(puzzle),
        "shown_when_fixed": fixed.shows(puzzle),
        "codes": broken.codes,
        "codes_when_fixed": fixed.codes,
        "took_s": round(broken.took_s, 1),
    }
    is_right = found["shown"] and not found["shown_when_fixed"] and fixed.codes[0] == 0
    print(f"{'ok   ' if is_right else 'WRONG'} puzzle {puzzle.name}: {found}", flush=True)
    if not is_right:
        print(broken.said, fixed.said, sep="\n--- fixed:\n", flush=True)
        return False
    results = _results()
    results[_PUZZLES] = {**results.get(_PUZZLES, {}), puzzle.name: found}
    write(results)
    return True


def check_exercise(exercise: Exercise, folder: Path) -> bool:
    """All files of one exercise; kept if each is found to be what it is."""
    rows = []
    folder.mkdir()
    for row in rows_of(exercise, folder):
        mark = "ok   " if row.is_right else "WRONG"
        said = row.found if row.is_right else f"{row.found}, not {row.expected}"
        print(f"{mark} {exercise.name}: {row.kind}: {said} ({row.took_s:.1f} s)", flush=True)
        rows.append(row)
    if not all(row.is_right for row in rows):
        return False
    keep(rows)
    return True


def main(names: list[str]) -> int:
    asked_puzzles = [puzzle for puzzle in puzzles() if not names or puzzle.name in names]
    others = [name for name in names if name not in {puzzle.name for puzzle in puzzles()}]
    exercises = [exercise_named(name) for name in others] if names else list(EXERCISES)
    with tempfile.TemporaryDirectory() as folder:
        # the final system takes what lies beside it for the learner's other exercises
        passed = [check_exercise(exercise, Path(folder, exercise.name)) for exercise in exercises]
        passed += [check_puzzle(puzzle, Path(folder) / puzzle.name) for puzzle in asked_puzzles]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
