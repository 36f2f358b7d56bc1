"""An all-reduce on hosts: the sum is right, and the slow links carry as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.core.text import readable_bytes
from drivetrain.learn.attempt import Outcome, Shortcoming, run_on_ranks
from drivetrain.learn.checks.all_reduce import BASE, judge_counts, misplaced
from drivetrain.learn.flow import Flow, RecordedCall
from drivetrain.learn.verdict import Passed, Score

_HOSTS = ((2, 2), (3, 2), (2, 3))
"""Number of hosts, and of ranks on each."""
_LENGTHS = (12, 10, 1)
_LARGE = 9240
_LARGE_BYTES = 4 * _LARGE
_SLACK = 1.05


def check(file: Path) -> Passed:
    for num_hosts, num_local in _HOSTS:
        outcome = run_on_ranks(file, _reductions, num_hosts * num_local, (num_local,))
        where = f"{num_hosts} hosts of {num_local} ranks"
        _judge_sums(outcome, num_local, where)
        crossing = _crossing(outcome.flow("large"), num_local)
        _judge_crossing(crossing, num_hosts, num_local, where, outcome)
    least = _least(num_hosts)
    by_host = _by_host(crossing, num_local)
    return Passed(
        [
            f"the sum is right on {_named_hosts()}, for tensors of"
            f" {', '.join(map(str, _LENGTHS))} and {_LARGE} elements",
        ],
        [
            Score(f"bytes a host sends to others, {where}", max(by_host), least, "2(h−1)/h·S"),
            Score(
                f"of these by the busiest rank, {where}",
                max(crossing),
                least / num_local,
                "2(h−1)/h·S/k",
            ),
        ],
        outcome.flow("large").picture(),
    )


def _named_hosts() -> str:
    return ", ".join(f"{hosts} hosts of {local} ranks" for hosts, local in _HOSTS)


def _least(num_hosts: int) -> float:
    return 2 * (num_hosts - 1) / num_hosts * _LARGE_BYTES


def _section(length: int) -> str:
    return f"a tensor of {length} elements"


def _reductions(module: Any, recorder: Any, num_local: int) -> list[tuple[list[float], Any]]:
    host, across = _groups(num_local)
    results: list[tuple[list[float], Any]] = []
    for length in _LENGTHS:
        recorder.section(_section(length))
        counted = torch.full((length,), float(BASE ** dist.get_rank()), dtype=torch.float64)
        module.hierarchical_all_reduce(counted, host, across)
        recorder.section(f"{_section(length)}, places")
        places = torch.arange(length, dtype=torch.float64)
        module.hierarchical_all_reduce(places, host, across)
        results.append((counted.tolist(), places.tolist()))
    recorder.section("large")
    large = torch.full((_LARGE,), float(BASE ** dist.get_rank()))
    module.hierarchical_all_reduce(large, host, across)
    return results


def _groups(num_local: int) -> tuple[Any, Any]:
    """Return this rank's groups; every rank has to create all groups."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    hosts = [list(range(a, a + num_local)) for a in range(0, num_ranks, num_local)]
    places = [list(range(place, num_ranks, num_local)) for place in range(num_local)]
    made = [(ranks, dist.new_group(ranks)) for ranks in (*hosts, *places)]
    host, across = (group for ranks, group in made if rank in ranks)
    return host, across


def _judge_sums(outcome: Outcome, num_local: int, where: str) -> None:
    num_ranks = len(outcome.results)
    for index, length in enumerate(_LENGTHS):
        at = f"{where}, {_section(length)}"
        picture = outcome.flow(_section(length)).picture()
        counted = [result[index][0] for result in outcome.results]
        _judge_hosts(counted, num_local, at, picture)
        judge_counts(counted, num_ranks, at, picture)
        for rank, result in enumerate(outcome.results):
            if result[index][1] != [float(num_ranks * place) for place in range(length)]:
                raise misplaced(result[index][1], rank, num_ranks, at, picture)


def _judge_hosts(counted: Sequence[list[float]], num_local: int, at: str, picture: str) -> None:
    """Detect the two steps that are forgotten most easily: every element shows them."""
    for rank, values in enumerate(counted):
        first = rank - rank % num_local
        of_host = sum(BASE**each for each in range(first, first + num_local))
        of_place = sum(BASE**each for each in range(rank % num_local, len(counted), num_local))
        for right, hint, found in (
            (of_host, "host-only", "the sum of this host's ranks alone"),
            (of_place, "across-only", "the sum of the ranks at this position alone"),
        ):
            if all(value == right for value in values):
                raise Shortcoming(
                    hint,
                    "on every rank, each element is the sum of all ranks' values",
                    f"rank {rank}: {found}",
                    where=at,
                    picture=picture,
                )


def _crossing(flow: Flow, num_local: int) -> list[float]:
    """Return the bytes that each rank sends to another host.

    A collective is counted as a ring in the order of its group's ranks.
    """
    crossing = [0.0] * flow.num_ranks
    for log in flow.logs:
        for call in log.calls.values():
            target = _next_rank(call, log.rank, flow.num_ranks)
            if target is not None and target // num_local != log.rank // num_local:
                is_send = call.kind == "send"
                sent = call.num_bytes if is_send else call.sent_bytes(flow.num_ranks)
                crossing[log.rank] += sent
    return crossing


def _next_rank(call: RecordedCall, rank: int, num_ranks: int) -> int | None:
    if call.kind in ("send", "recv"):
        return call.peer if call.kind == "send" else None
    ranks = call.ranks or tuple(range(num_ranks))
    return ranks[(ranks.index(rank) + 1) % len(ranks)] if rank in ranks else None


def _by_host(crossing: Sequence[float], num_local: int) -> list[float]:
    return [sum(crossing[a : a + num_local]) for a in range(0, len(crossing), num_local)]


def _judge_crossing(
    crossing: Sequence[float], num_hosts: int, num_local: int, where: str, outcome: Outcome
) -> None:
    by_host, least = _by_host(crossing, num_local), _least(num_hosts)
    busiest = max(range(num_hosts), key=lambda host: by_host[host])
    if by_host[busiest] <= least * _SLACK:
        return
    is_whole = by_host[busiest] > least * num_local * 0.9
    raise Shortcoming(
        "whole-tensor-crosses" if is_whole else "crosses-too-much",
        f"no host sends more than 2(h−1)/h·S = {readable_bytes(least)} to others"
        f" (S = {readable_bytes(_LARGE_BYTES)}, h = {num_hosts})",
        f"host {busiest} sent {readable_bytes(by_host[busiest])},"
        f" {by_host[busiest] / least:.2g} times as much",
        where=where,
        picture=outcome.flow("large").picture(),
    )
