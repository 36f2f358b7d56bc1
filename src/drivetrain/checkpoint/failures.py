"""What went wrong in a save or a load, out of the errors of all ranks that torch wraps in one."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint import lineage
from drivetrain.core.errors import EnvironmentProblem, Problem


class RanksFailed(Exception):
    """A save that failed on some rank, on all of them; its text is that rank's reason."""


def no_good_one(folder: str, address: str) -> EnvironmentProblem:
    """Nobody would want a long run to begin anew without being asked."""
    rule = f"{folder} is damaged, and no checkpoint before it is good"
    remedy = "remove it to begin anew, or set checkpoint.resume_from"
    return EnvironmentProblem([Problem("checkpoints", rule, remedy, address)])


def stale(error: BaseException) -> lineage.StaleAttempt | None:
    """When another attempt owns the run by now."""
    return next((e for e in causes(error) if isinstance(e, lineage.StaleAttempt)), None)


def is_of_the_storage(error: BaseException) -> bool:
    """A read that failed is no damage: tried again, by another attempt, it may well go through."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def causes(error: BaseException) -> list[BaseException]:
    """An error, and those of other ranks that torch wraps in it."""
    found = [error]
    if isinstance(error, CheckpointException):
        found += [failure[0] for failure in error.failures.values()]
    return found


def reason(error: BaseException) -> str:
    """The first real cause in one line."""
    cause = causes(error)[-1]
    if isinstance(cause, RanksFailed):
        return str(cause)
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
