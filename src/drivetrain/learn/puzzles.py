"""Debugging puzzles: a training script with one bug, to be found with Drivetrain's own tools."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn.exercises import COURSE
from drivetrain.learn.folder import ExerciseState, LearnerFolder
from drivetrain.learn.width import text_width

Say = Callable[[str], None]


@dataclass(frozen=True)
class Puzzle:
    """One script, what its users report, and what is wrong with it."""

    name: str
    kind: str
    """The kind of bug, shown when it is found."""
    title: str
    symptom: str
    commands: tuple[str, ...]
    """Commands that show the bug, run in the learner's folder."""
    shows: str
    """Part of the last command's output, as long as the bug is there."""
    old: str
    new: str
    """The fix: `old` is replaced by `new`."""
    near: dict[str, str]
    """Lines that are often mistaken for the bug, and the reply."""
    hints: tuple[str, ...]
    explanation: str

    @property
    def file(self) -> str:
        """Path of the script, relative to the learner's folder."""
        return f"puzzles/{self.name}.py"

    @property
    def script(self) -> Path:
        return COURSE / self.file

    @property
    def text(self) -> str:
        return self.script.read_text()

    @property
    def fixed(self) -> str:
        if self.text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is not in the script once")
        return self.text.replace(self.old, self.new)

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines that the fix changes, counted from 1."""
        here, there = self.text.splitlines(), self.fixed.splitlines()
        return {
            number + 1
            for kind, first, end, _, _ in SequenceMatcher(a=here, b=there).get_opcodes()
            if kind in ("replace", "delete")
            for number in range(first, end)
        }


@cache
def puzzles() -> tuple[Puzzle, ...]:
    read: dict[str, dict[str, Any]] = yaml.safe_load((COURSE / "puzzles.yaml").read_text())
    return tuple(_made(name, values) for name, values in read.items())


def _made(name: str, values: dict[str, Any]) -> Puzzle:
    fix = values.pop("fix")
    near = {each["line"]: each["reply"] for each in values.pop("near")}
    commands, hints = tuple(values.pop("commands")), tuple(values.pop("hints"))
    return Puzzle(
        name, old=fix["old"], new=fix["new"], near=near, commands=commands, hints=hints, **values
    )


def puzzle_named(name: str) -> Puzzle:
    """Find a puzzle by its name, or by its file's name, as a shell completes it."""
    for puzzle in puzzles():
        if puzzle.name == Path(name).stem:
            return puzzle
    names = ", ".join(puzzle.name for puzzle in puzzles())
    raise ConfigError([Problem("puzzle", "no such puzzle", f"choose: {names}", name)])


def list_puzzles(folder: LearnerFolder | None, say: Say) -> None:
    """List the puzzles, with the kind of bug for those that are found."""
    for puzzle in puzzles():
        is_found = folder is not None and state_of(puzzle, folder).is_passed
        beside = f"   ✓ {puzzle.kind}" if is_found else ""
        say(f"  {puzzle.name:10s} {puzzle.title}{beside}")
    say("")
    say("drivetrain learn puzzle start NAME   copies its script to this folder and shows details")


def start_puzzle(puzzle: Puzzle, here: Path, say: Say) -> None:
    """Copy the script, and show what its users report and what to run."""
    is_new = bool(LearnerFolder(here).copy([(puzzle.script, puzzle.file)]))
    say(f"wrote {puzzle.file}" if is_new else f"{puzzle.file} exists already")
    say("")
    for line in _wrapped(puzzle.symptom):
        say(f"  {line}")
    say("")
    say("to see it, run")
    for command in puzzle.commands:
        say(f"  {command}")
    say("")
    say(f"found it?  drivetrain learn puzzle check {puzzle.name} LINE")
    say(f"stuck?     drivetrain learn puzzle hint {puzzle.name}")


def check_line(puzzle: Puzzle, number: int, folder: LearnerFolder, say: Say) -> bool:
    """True if the bug is in this line of the learner's file."""
    file = folder.path / puzzle.file
    if not file.is_file():
        remedy = f"copy it with drivetrain learn puzzle start {puzzle.name}"
        raise ConfigError([Problem("puzzle", "script not found", remedy, puzzle.file)])
    lines = file.read_text().splitlines()
    if not 1 <= number <= len(lines):
        remedy = f"choose 1 to {len(lines)}"
        raise ConfigError([Problem("LINE", f"{puzzle.file} has no such line", remedy, number)])
    meant = _in_the_original(lines, puzzle.text.splitlines(), number)
    state = state_of(puzzle, folder)
    state.num_tries += 1
    is_right = bool(meant & puzzle.lines)
    state.is_passed = state.is_passed or is_right
    folder.remember_named(_key(puzzle), state)
    say(f"{'✓' if is_right else '✗'} {puzzle.file}:{number}: {lines[number - 1].strip()}")
    if is_right:
        _tell_found(puzzle, say)
    else:
        _tell_other(puzzle, lines[number - 1].strip(), say)
    return is_right


def _in_the_original(here: Sequence[str], original: Sequence[str], number: int) -> set[int]:
    """Return the original's lines that match this one: learners add prints, and try changes."""
    for kind, first, end, there, there_end in SequenceMatcher(a=here, b=original).get_opcodes():
        if first < number <= end:
            if kind == "equal":
                return {there + number - first}
            return set(range(there + 1, there_end + 1))
    return set()


def _tell_found(puzzle: Puzzle, say: Say) -> None:
    say(f"  {puzzle.kind}")
    _tell_explanation(puzzle, say)
    say("")
    say(f"the fixed script: drivetrain learn puzzle solution {puzzle.name}")


def _tell_other(puzzle: Puzzle, line: str, say: Say) -> None:
    for text in _wrapped(puzzle.near.get(line, _nothing_here(line))):
        say(f"  {text}")
    say("")
    say(f"a hint: drivetrain learn puzzle hint {puzzle.name}")


def _nothing_here(line: str) -> str:
    if not line:
        return "This line is empty. The bug is in a line that does something."
    if line.startswith("#"):
        return "A comment has no effect, and may be wrong. Look at what the code does."
    return "This line is right. Another line causes what the command shows."


def give_hint(puzzle: Puzzle, folder: LearnerFolder, say: Say) -> None:
    """Give one hint at a time; start again when there are no more."""
    state = state_of(puzzle, folder)
    number = len(state.hints_given) % len(puzzle.hints)
    if number == 0 and state.hints_given:
        say("(no more hints; starting again)")
        state.hints_given = []
    state.hints_given.append(str(number + 1))
    folder.remember_named(_key(puzzle), state)
    say(f"{puzzle.name}:")
    for line in _wrapped(puzzle.hints[number]):
        say(f"  {line}")
    left = len(puzzle.hints) - number - 1
    say("")
    more = f"{left} more: drivetrain learn puzzle hint {puzzle.name}"
    say(more if left else "this was the last hint")


def give_solution(puzzle: Puzzle, folder: LearnerFolder, say: Say) -> None:
    """Write the fixed script, after a try, and explain the bug."""
    if state_of(puzzle, folder).num_tries == 0:
        remedy = f"drivetrain learn puzzle check {puzzle.name} LINE, even with a guess"
        rule = "the solution is available only after a try"
        raise ConfigError([Problem("solution", rule, remedy, puzzle.name)])
    target = folder.path / "solutions" / puzzle.file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(puzzle.fixed)
    say(f"wrote {target.relative_to(folder.path)}; line {_listed(puzzle.lines)} was wrong:")
    for mark, line in _changes(puzzle):
        say(f"  {mark} {line}")
    say("")
    _tell_explanation(puzzle, say)


def _tell_explanation(puzzle: Puzzle, say: Say) -> None:
    for line in _wrapped(puzzle.explanation):
        say(f"  {line}")


def _changes(puzzle: Puzzle) -> Iterator[tuple[str, str]]:
    here, there = puzzle.text.splitlines(), puzzle.fixed.splitlines()
    for kind, first, end, other, other_end in SequenceMatcher(a=here, b=there).get_opcodes():
        if kind != "equal":
            yield from (("-", line.strip()) for line in here[first:end])
            yield from (("+", line.strip()) for line in there[other:other_end])


def tell_puzzles(folder: LearnerFolder, say: Say) -> None:
    """List the puzzles for `drivetrain learn progress`."""
    say(f"puzzles   {num_found(folder)} of {len(puzzles())} found")
    for puzzle in puzzles():
        state = state_of(puzzle, folder)
        mark = "✓" if state.is_passed else " "
        tries = f"{state.num_tries} tries" if state.num_tries != 1 else "1 try"
        say(f"  [{mark}] {puzzle.name:22s} {tries if state.num_tries else ''}".rstrip())


def num_found(folder: LearnerFolder) -> int:
    return sum(state_of(puzzle, folder).is_passed for puzzle in puzzles())


def state_of(puzzle: Puzzle, folder: LearnerFolder) -> ExerciseState:
    return folder.state_named(_key(puzzle))


def _key(puzzle: Puzzle) -> str:
    return f"puzzle {puzzle.name}"


def _listed(numbers: set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, text_width() - 2)
