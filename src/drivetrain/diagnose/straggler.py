"""Straggler: a rank that the others wait for, step after step.

A rank is judged by the time it takes *before* it waits for the others (data and its own computing),
because the whole step takes equally long on every rank. Each step is compared with the same step of
the other ranks, so that what slows all of them down at once does not count. Pure: the input is
arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drivetrain.diagnose.finding import Finding, Kind, Severity

Array = npt.NDArray[np.float64]

WINDOW = 10
"""Number of steps that are judged together."""
EXCESS = 0.05
"""A rank whose excess over the others is below this is not slow."""
_SLOWEST_IN = 0.8
"""Fraction of a window's steps in which a slow rank must be the slowest."""
_WORTH, _WORTH_IN_PASSING = 0.04, 0.08
"""Share of the run's time that it must cost to be a finding; more if it is over: a CPU of a shared
machine may run a quarter slower for a second or two."""
_SURE_STEPS = 100
"""From this many slow steps on, a rank's cost counts from when it became slow, not over the run."""
_CLIP = 0.5
"""Limits the weight of a single very long step."""


@dataclass(frozen=True)
class Lag:
    """What one rank's slowness cost."""

    rank: int
    excess: float
    """How much longer its own work took than the others', in the median slow step."""
    cost: float
    """Share of the steps' time that the others spent waiting for it, beyond what they wait for any
    rank by chance: of all steps, or if it has been slow for long, of the steps since then."""
    steps: tuple[int, int]
    """First and last step it was slow in."""
    is_persistent: bool
    data_share: float
    """Share of its excess that is waiting for data."""


def excess_over_others(own_s: Array) -> Array:
    """Return each rank's own time over the median of the others', less one: [ranks × steps]."""
    num_ranks = len(own_s)
    if num_ranks <= 32:
        others = np.stack([np.median(np.delete(own_s, r, 0), axis=0) for r in range(num_ranks)])
    else:  # leaving out one of many hardly changes the median
        others = np.broadcast_to(np.median(own_s, axis=0), own_s.shape)
    result: Array = own_s / np.maximum(others, 1e-9) - 1.0
    return result


def slow_windows(own_s: Array) -> npt.NDArray[np.bool_]:
    """Return whether a rank was slow in the ten steps up to each step: [ranks × windows]."""
    num_ranks, num_steps = own_s.shape
    if num_ranks < 2 or num_steps < WINDOW:
        return np.zeros((num_ranks, max(0, num_steps - WINDOW + 1)), dtype=bool)
    is_slowest = np.argmax(own_s, axis=0) == np.arange(num_ranks)[:, None]
    times = np.cumsum(np.pad(is_slowest, ((0, 0), (1, 0))), axis=1, dtype=np.int32)
    slow: npt.NDArray[np.bool_] = times[:, WINDOW:] - times[:, :-WINDOW] >= _SLOWEST_IN * WINDOW
    excess = excess_over_others(own_s)
    for rank in np.flatnonzero(slow.any(axis=1)):  # only a few of thousands of ranks
        windows = np.lib.stride_tricks.sliding_window_view(excess[rank], WINDOW)
        slow[rank] &= np.median(windows, axis=1) > EXCESS
    return slow


def find_lags(own_s: Array, data_wait_s: Array, lap_s: Array, steps: Array) -> list[Lag]:
    """Return the ranks that were or are slow for a while; the most costly first."""
    if len(own_s) < 2:  # no other rank to compare with
        return []
    excess, found = excess_over_others(own_s), []
    for rank in np.flatnonzero(slow_windows(own_s).any(axis=1)):
        stretch = dearest_stretch(excess[rank])
        lag = _lag(int(rank), stretch, own_s, data_wait_s, lap_s)
        first, last = steps[stretch][0], steps[stretch][-1]
        found.append(replace(lag, steps=(int(first), int(last))))
    return sorted(filter(_is_worth_it, found), key=lambda lag: -lag.cost)


def _is_worth_it(lag: Lag) -> bool:
    worth = _WORTH if lag.is_persistent else _WORTH_IN_PASSING
    return lag.excess > EXCESS and lag.cost >= worth


def dearest_stretch(excess: Array) -> slice:
    """Return the stretch in which a rank was slow: where the excess over the limit sums highest.

    A short recovery or an idle moment does not end the stretch.
    """
    beyond = np.clip(excess, -_CLIP, _CLIP) - EXCESS
    total = np.concatenate([[0.0], np.cumsum(beyond)])
    lowest_before = np.minimum.accumulate(total)
    end = int(np.argmax(total - lowest_before))
    return slice(int(np.argmin(total[: end + 1])), max(end, 1))


def _lag(rank: int, stretch: slice, own_s: Array, data_wait_s: Array, lap_s: Array) -> Lag:
    here_s = own_s[:, stretch]
    lost_s = [_waited_for(each, here_s) for each in (rank, *_some_others(rank, len(own_s)))]
    # some rank is last in every step by chance: subtract that cost
    net_s = lost_s[0] - float(np.mean(lost_s[1:]))
    lasts = stretch.stop > own_s.shape[1] - 2 * WINDOW
    # a rank that is still slow will keep costing what it costs now
    counts = stretch if lasts and here_s.shape[1] >= _SURE_STEPS else slice(None)
    more_data_s = data_wait_s[rank, stretch] - np.median(_without(data_wait_s, rank, stretch), 0)
    more_s = float(np.sum(own_s[rank, stretch] - np.median(_without(own_s, rank, stretch), 0)))
    return Lag(
        rank=rank,
        excess=float(np.median(excess_over_others(here_s)[rank])),
        cost=net_s / float(lap_s[:, counts].max(axis=0).sum()),
        steps=(0, 0),
        is_persistent=lasts,
        data_share=float(np.sum(more_data_s)) / more_s if more_s > 0 else 0.0,
    )


def _waited_for(rank: int, own_s: Array) -> float:
    """Return the seconds in which all other ranks were done and this one was not."""
    others_s = np.delete(own_s, rank, 0).max(axis=0)
    return float(np.maximum(0.0, own_s[rank] - others_s).sum())


def _some_others(rank: int, num_ranks: int) -> list[int]:
    """Return a sample of other ranks, large enough for a mean."""
    every = max(1, num_ranks // 8)
    return [other for other in range(0, num_ranks, every) if other != rank] or [1 - rank]


def _without(values: Array, rank: int, stretch: slice) -> Array:
    others: Array = np.delete(values[:, stretch], rank, 0)
    return others


def as_finding(lag: Lag, rank: int, host: str, starved: float | None) -> Finding:
    """Build the finding; `starved` is the share of time the rank was runnable without a CPU."""
    cause, remedy = _cause(lag, starved)
    where = f"rank {rank} ({host})" if host else f"rank {rank}"
    since = (
        f"since step {lag.steps[0]}"
        if lag.is_persistent
        else f"from step {lag.steps[0]} to {lag.steps[1]} only"
    )
    return Finding(
        Severity.WARNING,
        Kind.STRAGGLER,
        f"{where} takes {lag.excess:.0%} longer than the others before each collective, {since}: "
        f"{cause}; the others wait {lag.cost:.0%} of the time for it",
        remedy,
        tuple(
            text
            for text in (
                f"its own work takes {lag.excess:.1%} longer than the other ranks' (median step)",
                f"of that, waiting for data: {max(0.0, lag.data_share):.0%}",
                "" if starved is None else f"runnable without a CPU: {starved:.0%}",
            )
            if text
        ),
        (rank,),
        host,
        step=lag.steps[0],
    )


def _cause(lag: Lag, starved: float | None) -> tuple[str, str]:
    if lag.data_share > 0.5:
        return (
            "it waits for data",
            "raise data.num_workers, or look at the storage that this rank reads from",
        )
    if starved is not None and starved > 0.04:
        return (
            "it does not get enough CPU time",
            "look for other processes and CPU limits (cgroup quota, cpuset) on that host",
        )
    return (
        "its computation is slower",
        "check that device or CPU (clock, temperature, power limit, errors), and whether this rank "
        "has more work than the others",
    )
