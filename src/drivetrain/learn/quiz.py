"""`drivetrain learn quiz`: one question after another, each checked and explained."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.learn.exercises import COURSE
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.width import text_width

Say = Callable[[str], None]
Ask = Callable[[str], str]
_STATE = "quiz"
_PASSING = 0.8


@dataclass(frozen=True)
class Question:
    """One question, with code or a command that gives the answer."""

    topic: str
    question: str
    choices: dict[str, str]
    answer: str
    explanation: str
    code: str = ""
    command: str = ""
    shows: str = ""


@cache
def questions() -> tuple[Question, ...]:
    read: list[dict[str, Any]] = yaml.safe_load((COURSE / "quiz.yaml").read_text())
    return tuple(Question(**values) for values in read)


def ask_questions(number: int | None, folder: LearnerFolder | None, ask: Ask, say: Say) -> None:
    """Ask one question, or all not answered yet; without a folder no score is kept."""
    for index in _asked(number, folder):
        is_right = _ask_one(index, ask, say)
        if is_right is None:
            break
        if folder is not None:
            _remember(folder, index, is_right)
    if folder is None:
        say("no score is kept here; `drivetrain learn start 1` creates a folder that keeps it")
    else:
        tell_score(folder, say)


def tell_score(folder: LearnerFolder, say: Say) -> None:
    """Print the score. Only first answers count: the explanation gives the right one."""
    scores = folder.state_named(_STATE).scores
    num_right, num_all = int(sum(scores.values())), len(questions())
    passed = ", passed" if has_passed(folder) else ""
    say(
        f"quiz: {len(scores)} of {num_all} questions answered,"
        f" {num_right} right on the first try{passed}"
    )


def has_passed(folder: LearnerFolder) -> bool:
    return sum(folder.state_named(_STATE).scores.values()) >= _PASSING * len(questions())


def _asked(number: int | None, folder: LearnerFolder | None) -> list[int]:
    everything = range(1, len(questions()) + 1)
    if number is not None:
        if number not in everything:
            remedy = f"choose 1 to {len(everything)}"
            raise ConfigError([Problem("--question", "no such question", remedy, number)])
        return [number]
    answered = {} if folder is None else folder.state_named(_STATE).scores
    return [index for index in everything if str(index) not in answered]


def _ask_one(index: int, ask: Ask, say: Say) -> bool | None:
    """Return whether the answer is right, or None if the learner quits."""
    question = questions()[index - 1]
    say(f"question {index} of {len(questions())} ({question.topic})")
    _tell(question.question, say)
    if question.code or question.command:
        say("  to find out, run" + (" in Python" if question.code else ""))
        for line in (question.code or question.command).splitlines():
            say(f"      {line}")
    for letter, choice in question.choices.items():
        _tell(f"{letter}) {choice}", say)
    given = _letter(question, ask, say)
    if not given:
        return None
    is_right = given == question.answer
    right = f"{question.answer}) {question.choices[question.answer]}"
    say("✓ right" if is_right else f"✗ the right answer is {right}")
    _tell(question.explanation, say)
    say("")
    return is_right


def _letter(question: Question, ask: Ask, say: Say) -> str:
    letters = ", ".join(question.choices)
    while True:
        try:
            given = ask(f"your answer ({letters}; q quits): ").strip().lower().rstrip(")")
        except EOFError:
            return ""
        if given in question.choices:
            return given
        if given == "q":
            return ""
        say(f"  {given!r} is none of {letters}")


def _remember(folder: LearnerFolder, index: int, is_right: bool) -> None:
    state = folder.state_named(_STATE)
    state.num_tries += 1
    state.scores.setdefault(str(index), float(is_right))
    folder.remember_named(_STATE, state)


def _tell(text: str, say: Say) -> None:
    for line in textwrap.wrap(text, text_width() - 4):
        say(f"  {line}")
