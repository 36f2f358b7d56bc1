"""Time a call on all ranks at once, and check its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.cluster.environments import detect
from drivetrain.collectives.operations import Form, Member, Prepared, prepare
from drivetrain.collectives.patterns import Pattern
from drivetrain.collectives.request import (
    REDUCING,
    ROOTED,
    CallTimes,
    CollectivesRequest,
    Measured,
    RankSet,
    Row,
    element_count,
)
from drivetrain.parallel.accelerator import Accelerator, accelerator_of
from drivetrain.parallel.clock import clock_of

SECONDS_EACH, FEWEST, MOST = 0.25, 5, 200


def timed(call: Callable[[], Any], calls: int, accelerator: Accelerator) -> list[float]:
    """Return the seconds of each call, with nothing but the call between two timestamps.

    On a device a timestamp is an event on the call's stream, without synchronization in between.
    A device without timed events is synchronized after each call.
    """
    clock = clock_of(accelerator)
    now, moments = clock.now, []
    if clock.is_true:
        for _ in range(calls):
            began = now()
            call()
            moments.append((began, now()))
    else:
        for _ in range(calls):
            began = now()
            call()
            accelerator.synchronize()
            moments.append((began, now()))
    accelerator.synchronize()
    return [clock.seconds(began, ended) for began, ended in moments]


def nodes_of_ranks() -> list[int]:
    """Return the node index of each rank, as the launcher counts nodes."""
    mine = torch.tensor([detect().node_rank])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return [int(node) for node in everyones]


def join(ranks: RankSet, device: torch.device) -> Member:
    """Create the set's groups and return this rank's membership. A collective call."""
    me, found = dist.get_rank(), None
    for each in ranks.groups:
        group = dist.new_group(list(each)) if len(ranks.groups) > 1 else dist.group.WORLD
        if me in each:
            found = Member(group, each, each.index(me), device)  # type: ignore[arg-type]
    assert found is not None, "every rank is in one group"  # noqa: S101 - by how sets are made
    return found


def measure(asked: CollectivesRequest, ranks: RankSet, member: Member) -> Iterator[Row]:
    """Yield row by row; every rank of the world takes part, each in its own group."""
    for operation in asked.operations:
        counts = (
            element_count(operation, size, asked.dtype, ranks.num_ranks) for size in asked.sizes
        )
        # nccl-tests also shows rows without elements; here only a barrier has such a row
        for count in (0,) if operation == "barrier" else dict.fromkeys(c for c in counts if c):
            yield _row(operation, count, asked, ranks, member)


def measure_all(
    asked: CollectivesRequest, sets: Sequence[RankSet], device: torch.device
) -> list[Measured]:
    return [Measured(each, tuple(measure(asked, each, join(each, device)))) for each in sets]


def _row(
    operation: str, count: int, asked: CollectivesRequest, ranks: RankSet, member: Member
) -> Row:
    found: list[CallTimes | None] = []
    for is_in_place in (False, True):
        form = Form(count, asked.dtype, asked.redop, is_in_place)
        is_wanted = asked.is_thorough or not any(found)
        prepared = prepare(operation, member, form) if is_wanted else None
        found.append(
            None if prepared is None else _call_times(operation, prepared, asked, ranks, member)
        )
    return Row(
        operation,
        count,
        asked.dtype,
        asked.redop if operation in REDUCING else "none",
        0 if operation in ROOTED else -1,
        ranks.num_ranks,
        *found,
    )


def _call_times(
    operation: str,
    prepared: Prepared,
    asked: CollectivesRequest,
    ranks: RankSet,
    member: Member,
) -> CallTimes:
    accelerator = accelerator_of(member.device)
    is_checked = asked.is_thorough and operation != "barrier"
    redop = asked.redop if operation in REDUCING else None
    patterns = [Pattern(asked.dtype, member.number, redop, repetition) for repetition in (0, 1)]
    # before the timed calls and, with different data, after them
    wrong = _wrong(prepared, patterns[0], accelerator) if is_checked else 0
    seconds = _all_seconds(prepared.call, asked, accelerator)
    wrong += _wrong(prepared, patterns[1], accelerator) if is_checked else 0
    total = torch.tensor([wrong])
    dist.all_reduce(total)
    means = seconds.mean(dim=1)
    slowest = int(means.argmax())
    in_turn = torch.cat([seconds[list(group)].amax(dim=0) for group in ranks.groups]).sort().values
    return CallTimes(
        time_s=float(means.mean()),
        p50_s=_percentile(in_turn, 50),
        p99_s=_percentile(in_turn, 99),
        slowest_rank=slowest,
        slowest_s=float(means[slowest]),
        calls=seconds.shape[1],
        wrong=int(total) if is_checked else None,
    )


def _wrong(prepared: Prepared, pattern: Pattern, accelerator: Accelerator) -> int:
    """Return the number of wrong elements on this rank after one call."""
    prepared.fill(pattern)
    prepared.call()
    accelerator.synchronize()
    return prepared.wrong(pattern)


def _all_seconds(
    call: Callable[[], Any], asked: CollectivesRequest, accelerator: Accelerator
) -> torch.Tensor:
    """Return seconds as [rank, call], with the same number of calls on every rank."""
    once = timed(call, max(1, asked.warmup), accelerator)[-1]
    wanted = max(FEWEST, min(MOST, int(SECONDS_EACH / max(once, 1e-7))))
    calls = torch.tensor([asked.calls or wanted])
    dist.all_reduce(calls, op=dist.ReduceOp.MIN)  # this also makes all ranks start at the same time
    mine = torch.tensor(timed(call, int(calls), accelerator), dtype=torch.float64)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return torch.stack(everyones)


def _percentile(ordered: torch.Tensor, percent: int) -> float:
    """Return the percentile of sorted values, by the same rule as nccl-tests."""
    last = ordered.numel() - 1
    return float(ordered[min(last, math.ceil(ordered.numel() * percent / 100) - 1)])
