"""Stragglers: the rank that computes longest, and for which all others wait."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed_step(compute: Callable[[], None], exchange: Callable[[], None]) -> tuple[float, float]:
    """Run both; return the seconds that each took on this rank."""
    begin = time.perf_counter()
    compute()
    between = time.perf_counter()
    exchange()
    return between - begin, time.perf_counter() - between


def gather_times(own: list[float]) -> list[list[float]]:
    """Return all ranks' times, by rank, on every rank."""
    mine = torch.tensor(own, dtype=torch.float64)
    everyone = torch.empty(dist.get_world_size() * len(own), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(dist.get_world_size(), len(own)).tolist()


def find_stragglers(times: list[list[float]], factor: float) -> list[int]:
    """Return the ranks that take more than `factor` times the usual time."""
    # Two medians: neither one bad step of a rank nor one bad rank changes the usual time.
    by_rank = [statistics.median(steps) for steps in times]
    usual = statistics.median(by_rank)
    return [rank for rank, seconds in enumerate(by_rank) if seconds > factor * usual]


def which_time(step: tuple[float, float]) -> float:
    """Return the time to compute: in the exchange the others wait, but not the straggler."""
    return step[0]
