"""Extract the cause of a failed save or load from the error that torch wraps around all ranks'."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint import lineage
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.core.errors import EnvironmentProblem, Problem


class RanksFailed(Exception):
    """A save that failed on one rank, and so on all; the text is that rank's reason."""


def no_good_one(skipped: str, address: str) -> EnvironmentProblem:
    """Return the error for a run that would otherwise silently start over."""
    rule = f"no checkpoint is good: {skipped}"
    remedy = "remove them to start over, or set checkpoint.resume_from"
    return EnvironmentProblem([Problem("checkpoints", rule, remedy, address)])


def stale(error: BaseException) -> lineage.StaleAttempt | None:
    """Return the StaleAttempt among the causes, if there is one."""
    return next((e for e in causes(error) if isinstance(e, lineage.StaleAttempt)), None)


def is_of_the_storage(error: BaseException) -> bool:
    """True for a failed read, which is not damage: another attempt may succeed."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and the other ranks' errors that torch wraps in it."""
    found = [error]
    if isinstance(error, CheckpointException):
        found += [failure[0] for failure in error.failures.values()]
    return found


def reason(error: BaseException) -> str:
    """Return the cause in one line."""
    cause = causes(error)[-1]
    if isinstance(cause, (RanksFailed, DamagedCheckpoint)):
        return str(cause)
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
