"""Phase 3 of the course: what its checks measure by. `make course` runs every attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from drivetrain.learn.allocations import allocations, held_bytes
from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.checks.hierarchical_allreduce import _crossing
from drivetrain.learn.exercises import EXERCISES
from drivetrain.learn.flow import Flow, RankLog, RecordedCall, read_record
from drivetrain.learn.shards import Move, judge_move
from tests.learn.course import RESULTS


class _Holder:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = {"kept": list(tensors)}


def test_a_view_counts_as_all_that_it_keeps() -> None:
    whole = torch.zeros(100)
    assert held_bytes(_Holder(whole[:10])) == 400
    assert held_bytes(_Holder(whole[:10].clone())) == 40
    assert held_bytes(_Holder(whole, whole[:5])) == 400
    assert held_bytes(_Holder(whole), besides=[whole]) == 0


def test_allocations_see_what_is_freed_and_what_autograd_keeps() -> None:
    weight = torch.zeros(100, 100, requires_grad=True)
    freed = allocations(lambda: float((torch.zeros(1, 100) @ (weight.detach() + 1)).sum()))
    assert freed.peak_bytes >= 40_000
    assert freed.kept_bytes == 0
    kept: list[torch.Tensor] = []
    graph = allocations(lambda: kept.append(torch.ones(1, 100, requires_grad=True) @ (weight + 1)))
    assert graph.kept_bytes >= 40_000


def test_a_request_may_end_in_a_later_section(tmp_path: Path) -> None:
    log = tmp_path / "0.jsonl"
    log.write_text(
        '{"section": "a"}\n'
        '{"call": 0, "kind": "all_reduce", "peer": null, "bytes": 8, "tag": 0, "line": 1,'
        ' "ranks": [0, 2], "left": null}\n'
        '{"section": "b"}\n{"mark": "here", "before": 1}\n'
        '{"done": 0, "peer": null, "changed": false}\n'
    )
    record = read_record(log, 0)
    call = record.sections["a"].calls[0]
    assert call.is_done
    assert call.ranks == (0, 2)
    assert call.sent_bytes(num_ranks=8) == 8  # 2(n−1)/n of its group of two, not of eight
    assert record.sections["b"].marks == {"here": 1}


def test_only_what_leaves_a_host_crosses() -> None:
    def log(rank: int, *groups: tuple[int, ...]) -> RankLog:
        calls = {
            index: RecordedCall(index, "all_reduce", None, 100, 0, 1, ranks=ranks)
            for index, ranks in enumerate(groups)
        }
        return RankLog(rank, calls)

    inside = Flow(tuple(log(rank, (rank // 2 * 2, rank // 2 * 2 + 1)) for rank in range(4)))
    assert _crossing(inside, num_local=2) == [0, 0, 0, 0]
    across = Flow(tuple(log(rank, (rank % 2, rank % 2 + 2)) for rank in range(4)))
    assert _crossing(across, num_local=2) == [100, 100, 100, 100]
    flat = Flow(tuple(log(rank, ()) for rank in range(4)))
    assert _crossing(flat, num_local=2) == [0, 150, 0, 150]


def test_a_wrong_move_is_explained() -> None:
    generator = torch.Generator().manual_seed(0)
    alone = [torch.randn(20, generator=generator) for _ in range(4)]
    right = torch.stack(alone).mean(0)
    judge_move(Move(right, [right] * 4, alone), "")
    for found, hint in (
        (right * 4, "not-divided"),
        (right / 4, "divided-twice"),
        (torch.cat([each[5 * r : 5 * r + 5] for r, each in enumerate(alone)]), "own-gradient"),
        (torch.cat([right[:18], torch.zeros(2)]), "rest"),
        (right.roll(5), "wrong-part"),
        (right + torch.arange(20), "wrong-step"),
    ):
        with pytest.raises(Shortcoming) as told:
            judge_move(Move(right, [found] * 4, alone), "")
        assert told.value.hint == hint


def test_solutions_reach_the_limits() -> None:
    """As far as `make course` has measured them."""
    results = yaml.safe_load(RESULTS.read_text())
    names = [each.name for each in EXERCISES if each.phase.number == 3 and each.name in results]
    assert "zero1" in names
    for name in names:
        assert all(share >= 0.95 for share in results[name]["scores"].values()), name
