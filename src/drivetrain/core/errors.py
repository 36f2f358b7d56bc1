"""Errors whose type says what to do next, and whose code raised them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

# Errors whose type says what to do next, each with its own exit code.
#
# Every message a user can act on has one form::
#
#     where = value: rule broken; what to do


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and how to put it right."""

    where: str
    rule: str
    remedy: str
    value: Any = None
    has_value: bool = True

    def __str__(self) -> str:
        shown = f" = {_shown(self.value)}" if self.has_value else ""
        return f"{self.where}{shown}: {self.rule}; {self.remedy}"


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class DrivetrainError(Exception):
    """Anything Drivetrain raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(DrivetrainError):
    """What the user said cannot be done as said. Carries every problem, not the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class LayoutError(ConfigError):
    """The ranks there are cannot be arranged as asked."""

    exit_code = 3


class EnvironmentProblem(ConfigError):
    """The machine, the scheduler's variables or a missing library stand in the way."""

    exit_code = 4


class WorkerFailure(DrivetrainError):
    """A rank failed; the message is that rank's own."""

    exit_code = 5


class Preempted(DrivetrainError):
    """The run was asked to stop, has saved, and should be started again to go on."""

    exit_code = 75  # sysexits' "temporary failure": try again


class NonFiniteLoss(DrivetrainError):
    """The loss stopped being a number; training on would only hide it."""

    exit_code = 6


class ReplicaDrift(DrivetrainError):
    """Ranks that must hold the same weights do not; what they save or average is worth nothing."""

    exit_code = 7


class NotSaved(DrivetrainError):
    """The last step could not be saved: what the run came to may be lost with its processes."""

    exit_code = 8


class DamagedRun(DrivetrainError):
    """What lies in a run's directory is not what Drivetrain writes there."""

    exit_code = 9


class SilentCorruption(DrivetrainError):
    """A rank computed other bits from the same numbers: its hardware is not to be trusted."""

    exit_code = 10


_FRAME = '  File "'


def exception_line(text: str) -> str:
    """The exception and the first line of its message; whatever comes last, without a traceback.

    Of a chain it is the last one's. A message that quotes another process's traceback (a data
    worker's) ends with that one's exception, which says more.
    """
    lines = text.strip("\n").splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if frames:
        for line in lines[frames[-1] + 1 :]:
            if line and not line.startswith(" "):  # below a frame: its source, marked and indented
                return line.strip()
    return lines[-1].strip() if lines else ""


# Whose code raised an error, said with the error: in its traceback, whoever prints it.
#
# It is a note of the exception: its type stays what the user raised and may catch, and the note
# comes with the text of a data worker's error too, where an attribute would be lost.

_NOTE = "raised by "
_NOTED = re.compile(r"^raised by (?P<who>.+)$", re.MULTILINE)


def blame(error: BaseException, who: str) -> None:
    """Say who raised it; what was said first, further inside, stays."""
    if isinstance(error, DrivetrainError):  # says what to do by itself
        return
    with contextlib.suppress(Exception):  # an error may be unable to say what it is
        if not raised_by("\n".join((*getattr(error, "__notes__", ()), str(error)))):
            error.add_note(f"{_NOTE}{who}")


def raised_by(text: str) -> str:
    """Who is blamed in a traceback; empty when nobody is."""
    found = _NOTED.search(text)
    return found["who"] if found else ""


def without_blame(text: str) -> str:
    """A traceback that ends with its exception, as Python has it."""
    return _NOTED.sub("", text).rstrip("\n")
