"""Stragglers: the rank that computes for long, and for which all others wait."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed_step(compute: Callable[[], None], exchange: Callable[[], None]) -> tuple[float, float]:
    """Run both; seconds that each of them took on this rank."""
    begin = time.perf_counter()
    compute()
    between = time.perf_counter()
    exchange()
    return between - begin, time.perf_counter() - between


def gather_times(own: list[float]) -> list[list[float]]:
    """All ranks' times, by rank, on every rank."""
    mine = torch.tensor(own, dtype=torch.float64)
    everyone = torch.empty(dist.get_world_size() * len(own), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(dist.get_world_size(), len(own)).tolist()


def find_stragglers(times: list[list[float]], factor: float) -> list[int]:
    """Ranks that need more than `factor` times as long as is usual."""
    # Medians, twice: neither one bad step of a rank nor one bad rank moves what is usual.
    by_rank = [statistics.median(steps) for steps in times]
    usual = statistics.median(by_rank)
    return [rank for rank, seconds in enumerate(by_rank) if seconds > factor * usual]


def which_time(step: tuple[float, float]) -> float:
    """Computing: in the exchange the others wait for the straggler, and it for nobody."""
    return step[0]
