"""`drivetrain learn quiz`: every question has one right answer, and running it gives that one."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.learn import quiz
from drivetrain.learn.exercises import PHASES
from drivetrain.learn.folder import LearnerFolder
from drivetrain.learn.quiz import Question, questions

_NUMBERED = list(enumerate(questions(), start=1))


def test_there_are_as_many_as_promised_and_most_are_answered_by_running_something() -> None:
    assert len(questions()) == 25
    assert sum(bool(each.code or each.command) for each in questions()) >= 20


@pytest.mark.parametrize(("number", "question"), _NUMBERED)
def test_one_choice_is_right_and_explained(number: int, question: Question) -> None:
    assert question.answer in question.choices
    assert all(isinstance(choice, str) and choice for choice in question.choices.values())
    assert len(set(question.choices.values())) == len(question.choices) >= 2
    assert len(question.explanation.split()) >= 10
    assert not (question.code and question.command)


def test_the_right_answer_is_not_always_the_same_letter() -> None:
    answers = [question.answer for question in questions()]
    assert max(answers.count(letter) for letter in "abcd") <= 10


@pytest.mark.parametrize(("number", "question"), [each for each in _NUMBERED if each[1].code])
def test_code_prints_the_right_choice(number: int, question: Question) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(question.code, {})  # noqa: S102  our own file
    assert said.getvalue().strip() == question.choices[question.answer]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("number", "question"), [each for each in _NUMBERED if each[1].command])
def test_command_shows_what_the_answer_says(number: int, question: Question) -> None:
    argv = [sys.executable, "-m", *shlex.split(question.command)]
    assert question.shows in subprocess.check_output(argv, text=True)


def _answers(*given: str) -> Iterator[str]:
    yield from given


def _play(folder: LearnerFolder | None, number: int | None, *given: str) -> str:
    said: list[str] = []
    answers = _answers(*given)

    def ask(prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    quiz.ask_questions(number, folder, ask, said.append)
    return "\n".join(said)


def test_first_answers_count_and_answered_questions_are_not_asked_again(tmp_path: Path) -> None:
    folder = LearnerFolder(tmp_path)
    folder.start(PHASES[0])
    wrong = next(letter for letter in questions()[1].choices if letter != questions()[1].answer)
    said = _play(folder, None, questions()[0].answer, "x", wrong)
    assert "✓ right" in said
    assert "'x' is none of a, b, c, d" in said
    assert f"✗ the right answer is {questions()[1].answer})" in said
    assert "quiz: 2 of 25 questions answered, 1 right on the first try" in said
    assert _play(folder, 2, questions()[1].answer).count("1 right on the first try") == 1
    again = _play(folder, None, "q")
    assert "question 3 of 25" in again
    assert "question 1 of 25" not in again


def test_enough_right_answers_pass(tmp_path: Path) -> None:
    folder = LearnerFolder(tmp_path)
    folder.start(PHASES[0])
    said = _play(folder, None, *(question.answer for question in questions()))
    assert said.endswith("quiz: 25 of 25 questions answered, 25 right on the first try, passed")


def test_without_a_folder_it_is_asked_and_said_that_no_score_is_kept(tmp_path: Path) -> None:
    assert "no score is kept here" in _play(None, 3, "a")
    with pytest.raises(ConfigError, match="choose 1 to 25"):
        _play(None, 26)


def test_in_the_terminal(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "drivetrain", "learn", "quiz", "--question", "5"]
    said = subprocess.check_output(argv, cwd=tmp_path, input="a\n", text=True)
    assert "question 5 of 25 (fundamentals)" in said
    assert "✓ right" in said
