"""Exercise stragglers: find the rank that slows down all others.

Guidelines: guidelines.md, part 5. Check: drivetrain learn check stragglers
"""

from collections.abc import Callable

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401


def timed_step(compute: Callable[[], None], exchange: Callable[[], None]) -> tuple[float, float]:
    """Run both, one after the other; return the seconds that each took on this rank."""
    # TODO 1
    raise NotImplementedError("TODO 1 of timed_step")


def gather_times(own: list[float]) -> list[list[float]]:
    """Return all ranks' times, by rank, on every rank; `own` has this rank's times of some steps.

    Called once for many steps, the same number on all ranks: one collective is enough.
    """
    # TODO 2
    raise NotImplementedError("TODO 2 of gather_times")


def find_stragglers(times: list[list[float]], factor: float) -> list[int]:
    """Return the ranks that take more than `factor` times the usual time, in order; often none.

    times[rank][step] is what `gather_times` returns for one of the two times of timed_step. One
    long step (a hiccup) does not make a straggler, nor does a step that was long on all ranks.
    """
    # TODO 3: what is the usual time of a rank, and of all ranks?
    raise NotImplementedError("TODO 3 of find_stragglers")


def which_time(step: tuple[float, float]) -> float:
    """Return the one of timed_step's two times that identifies a straggler."""
    # TODO 4
    raise NotImplementedError("TODO 4 of which_time")
