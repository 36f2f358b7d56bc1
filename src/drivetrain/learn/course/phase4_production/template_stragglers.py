"""Exercise stragglers: which rank slows all others down?

Guidelines: guidelines.md, part 5. Check: drivetrain learn check stragglers
"""

from collections.abc import Callable

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401


def timed_step(compute: Callable[[], None], exchange: Callable[[], None]) -> tuple[float, float]:
    """Run both, one after the other; seconds that each of them took on this rank."""
    # TODO 1
    raise NotImplementedError("TODO 1 of timed_step")


def gather_times(own: list[float]) -> list[list[float]]:
    """This rank's times of some steps → all ranks' times, by rank, on every rank.

    Called once for many steps, all ranks with equally many: one collective is enough.
    """
    # TODO 2
    raise NotImplementedError("TODO 2 of gather_times")


def find_stragglers(times: list[list[float]], factor: float) -> list[int]:
    """Ranks that need more than `factor` times as long as is usual, in order; often none.

    times[rank][step] is what `gather_times` returns of one of the two times of timed_step. A single
    step that took long (a hiccup) makes no straggler, and nor does a step that was long for all.
    """
    # TODO 3: what is usual for a rank, and what is usual among ranks?
    raise NotImplementedError("TODO 3 of find_stragglers")


def which_time(step: tuple[float, float]) -> float:
    """Of the two times of timed_step, the one that tells a straggler."""
    # TODO 4
    raise NotImplementedError("TODO 4 of which_time")
