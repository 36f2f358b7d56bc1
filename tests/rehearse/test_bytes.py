"""A rehearsal sends, byte for byte, what real ranks send."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.client import RehearsalRequest, rehearse
from drivetrain.testing.ranks import run_ranks
from tests.rehearse.recorded import SCRIPT, train_and_record

LAYOUTS = {
    "ddp": (),
    "fsdp": ("parallel.strategy=fsdp",),
    "fsdp x tp": ("parallel.strategy=fsdp", "parallel.tp=2"),
    "fsdp x pp": ("parallel.strategy=fsdp", "parallel.pp=2"),
    "hsdp": ("parallel.strategy=fsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "tp x pp": ("parallel.tp=2", "parallel.pp=2"),
}


def counted(calls: list[RehearsedCall] | tuple[RehearsedCall, ...]) -> Counter[RehearsedCall]:
    return Counter(replace(call, line=None) for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "fsdp" else pytest.mark.long) for name in LAYOUTS],
)
def test_every_collective_of_a_step_is_the_same(name: str, tmp_path: Path) -> None:
    words = (*LAYOUTS[name], "global_batch_size=16")
    real = run_ranks(train_and_record, 4, timeout_s=150, args=(words, str(tmp_path)))
    rehearsal = rehearse(
        RehearsalRequest((str(SCRIPT), "nothing", *words), 4, "all-kinds", timeout_s=900)
    )
    assert rehearsal.findings == ()
    assert len(rehearsal.reports) >= 2
    for report in rehearsal.reports:
        assert sum(call.num_bytes for call in report.in_step) > 0
        assert counted(report.in_step) == counted(real[report.rank])
