"""A rehearsal of experts: tokens are sent as in a run, as unevenly as was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.rehearse.client import RehearsalRequest, rehearse
from drivetrain.rehearse.findings import RankReport

SCRIPT = str(Path(__file__).parents[2] / "examples" / "moe.py")


def first_rank(*words: str) -> RankReport:
    said = ("global_batch_size=32", "parallel.strategy=fsdp", "parallel.ep=2", *words)
    found = rehearse(RehearsalRequest((SCRIPT, *said), 4))
    assert found.plan_problem is not None
    assert "a plan neither proposes nor prices it" in found.plan_problem
    report = found.reports[0]
    assert not report.failure
    return report


@pytest.mark.slow
@pytest.mark.long
def test_tokens_travel_in_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    even, uneven = first_rank(), first_rank("parallel.expert.imbalance=2")
    sent = [[c for c in r.in_step if c.name == "all_to_all"] for r in (even, uneven)]
    for calls in sent:
        assert {call.ranks for call in calls} == {(0, 1)}
        # in each of 3 layers: how many; tokens, their weights, results; and these three back
        assert len(calls) == 3 * 7
    sizes = [sum(call.num_bytes for call in calls) for calls in sent]
    assert 1.9 * sizes[0] < sizes[1] < 2.1 * sizes[0]
    assert uneven.memory.peak > 1.3 * even.memory.peak
