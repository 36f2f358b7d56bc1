"""The course's completion list: what is done, and the share of the whole course."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn import puzzles, quiz
from drivetrain.learn.exercises import EXERCISES, LABS, PHASES, exercises_of
from drivetrain.learn.folder import LearnerFolder

Say = Callable[[str], None]
NUM_LECTURES = 7
_PROJECT = "project"
BY_HAND = (*(f"lecture-{number}" for number in range(1, NUM_LECTURES + 1)), _PROJECT)
"""What no program can check: the learner marks it as done."""


@dataclass(frozen=True)
class Item:
    """One line of the list."""

    what: str
    num_done: int
    num_all: int = 1

    @property
    def is_done(self) -> bool:
        return self.num_done >= self.num_all

    def __str__(self) -> str:
        count = f"{self.num_done} of {self.num_all}" if self.num_all > 1 else ""
        return f"[{'✓' if self.is_done else ' '}] {self.what:44s} {count}".rstrip()


def completion(folder: LearnerFolder) -> list[Item]:
    def passed(names: Sequence[str]) -> int:
        return sum(folder.state_named(name).is_passed for name in names)

    return [
        Item("a folder with at least one passed check", _has_passed_any(folder)),
        Item("lectures read", passed(BY_HAND[:NUM_LECTURES]), NUM_LECTURES),
        *(
            Item(f"phase {phase.number}: {phase.title}", passed(names), len(names))
            for phase in PHASES
            for names in [[exercise.name for exercise in exercises_of(phase)]]
        ),
        Item("puzzles found", puzzles.num_found(folder), len(puzzles.puzzles())),
        *(Item(f"lab: {lab.title}", passed([lab.name])) for lab in LABS),
        Item("quiz passed (80%)", int(quiz.has_passed(folder))),
        Item("final project done", passed([_PROJECT])),
    ]


def _has_passed_any(folder: LearnerFolder) -> int:
    return int(any(folder.state_of(exercise).is_passed for exercise in EXERCISES))


def percent(items: Sequence[Item]) -> int:
    """Return the share done, with equal weights; 100 only if every item is done."""
    shares = [min(1.0, item.num_done / item.num_all) for item in items]
    return 100 if all(item.is_done for item in items) else int(99 * sum(shares) / len(shares))


def tell_completion(folder: LearnerFolder, say: Say) -> None:
    items = completion(folder)
    for item in items:
        say(f"  {item}")
    say(f"the course: {percent(items)}% done")
    if not all(folder.state_named(name).is_passed for name in BY_HAND):
        say("mark lectures and the project as done yourself: drivetrain learn done lecture-1")


def mark_done(name: str, folder: LearnerFolder, say: Say) -> None:
    """Mark a lecture or the project as done."""
    if name not in BY_HAND:
        remedy = f"choose: {', '.join(BY_HAND)}; everything else is done when its check passes"
        raise ConfigError([Problem("ITEM", "cannot be marked as done by hand", remedy, name)])
    state = folder.state_named(name)
    state.is_passed = True
    folder.remember_named(name, state)
    say(f"{name} is done; the course: {percent(completion(folder))}% done")
