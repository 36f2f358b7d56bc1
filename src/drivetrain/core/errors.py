"""Errors whose type says what to do next, each with its own exit code.

Every message a user can act on has one form::

    where = value: rule broken; what to do
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


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
