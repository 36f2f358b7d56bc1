"""The errors that Drivetrain raises, and notes that name the code that raised another error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

# Each error type tells the caller what to do next and has its own exit code.
#
# Every message that a user can act on has this form::
#
#     where = value: rule broken; what to do


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and how to fix it."""

    where: str
    rule: str
    remedy: str
    value: Any = None
    has_value: bool = True

    def __str__(self) -> str:
        shown = f" = {_shown(self.value)}" if self.has_value else ""
        return f"{self.where}{shown}: {self.rule}; {_with_verb(self.remedy)}"


def _with_verb(remedy: str) -> str:
    """A remedy that is only what to write, a flag or a command, is introduced by a verb."""
    verbs = {"-": "write ", "drivetrain ": "run "}
    verb = next((verb for start, verb in verbs.items() if remedy.startswith(start)), "")
    return f"{verb}{remedy}"


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class DrivetrainError(Exception):
    """Base class of every error that Drivetrain raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(DrivetrainError):
    """What was asked for is invalid or cannot be done. Lists every problem, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class LayoutError(ConfigError):
    """The available ranks cannot be arranged as configured."""

    exit_code = 3


class EnvironmentProblem(ConfigError):
    """The machine, the scheduler's variables or a missing library prevent the run."""

    exit_code = 4


class WorkerFailure(DrivetrainError):
    """A rank failed; the message is that rank's own error."""

    exit_code = 5


class Preempted(DrivetrainError):
    """The run was asked to stop and has saved; start it again to resume."""

    exit_code = 75  # sysexits' "temporary failure": try again


class StoppedByCtrlC(KeyboardInterrupt, SystemExit):
    """Ctrl-C in a plain `python script.py`: the run has saved; start it again to resume.

    What a script does on Ctrl-C, in `except KeyboardInterrupt:`, is done; `except Exception:` does
    not catch it. Uncaught, it ends the process like `SystemExit`: with its code, no traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = Preempted.exit_code


STOPS = (Preempted, StoppedByCtrlC)
"""What ends a run that was asked to stop and may resume."""


class NonFiniteLoss(DrivetrainError):
    """The loss became NaN or infinite; continuing would only hide it."""

    exit_code = 6


class ReplicaDrift(DrivetrainError):
    """Ranks that must hold the same weights do not; what they save or average is unusable."""

    exit_code = 7


class NotSaved(DrivetrainError):
    """The last step could not be saved; its results may be lost when the processes end."""

    exit_code = 8


class DamagedRun(DrivetrainError):
    """A file in a run's directory is not what Drivetrain writes there."""

    exit_code = 9


class SilentCorruption(DrivetrainError):
    """A rank computed different bits from the same input; its hardware cannot be trusted."""

    exit_code = 10


_FRAME = '  File "'


def exception_line(text: str) -> str:
    """Return the exception and the first line of its message from a traceback.

    In a chain of exceptions, this is the last one. A message that quotes another process's
    traceback (a data worker's) ends with that process's exception, which is more informative, so
    that one is returned. Text without a traceback gives its last line.
    """
    lines = text.strip("\n").splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if frames:
        for line in lines[frames[-1] + 1 :]:
            if line and not line.startswith(" "):  # lines below a frame show its source, indented
                return line.strip()
    return lines[-1].strip() if lines else ""


# The code that raised an error is named in a note of the exception, so every printed traceback
# shows it.
#
# A note keeps the exception's type, which the user may want to catch, and survives when a data
# worker's error is passed on as text, where an attribute would be lost.

_NOTE = "raised by "
_NOTED = re.compile(r"^raised by (?P<who>.+)$", re.MULTILINE)


def blame(error: BaseException, who: str) -> None:
    """Add a note that names what raised the error; an earlier note, from further inside, stays."""
    if isinstance(error, DrivetrainError):  # its message already names the cause
        return
    with contextlib.suppress(Exception):  # converting an error to text may fail
        if not raised_by("\n".join((*getattr(error, "__notes__", ()), str(error)))):
            error.add_note(f"{_NOTE}{who}")


def raised_by(text: str) -> str:
    """Return what the note in a traceback names, or "" if there is no note."""
    found = _NOTED.search(text)
    return found["who"] if found else ""


def without_blame(text: str) -> str:
    """Return the traceback without the note, so that it ends with its exception."""
    return _NOTED.sub("", text).rstrip("\n")
