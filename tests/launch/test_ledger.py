"""The ledger of real runs, against a clock that knows nothing of them. `make ledger` runs 20."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.ledger_check import KINDS, Row, check, table_of

LOST = {"killed": ("recovery", "redone"), "preempted": ("preempted", "checkpoint")}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", LOST)
def test_the_classes_of_a_broken_run_add_up_to_the_wall_clock(tmp_path: Path, kind: str) -> None:
    row = check(KINDS.index(kind), tmp_path, max_steps=120)
    assert row.kind == kind
    assert row.attempts == 2
    # a short run: what the shell takes to start and end a process weighs more than in a long one
    assert abs(row.ledger_s - row.outside_s) < 0.005 * row.outside_s + 0.1
    assert all(row.seconds[name] > 0 for name in ("productive", *LOST[kind]))


def test_the_table_names_the_worst() -> None:
    seconds = dict.fromkeys(("productive", "start_up"), 5.0)
    rows = [
        Row(0, "clean", 10.0, 10.01, 1, _all(seconds)),
        Row(1, "killed", 10.0, 9.98, 2, _all(seconds)),
    ]
    table = table_of(rows)
    assert "| 1 | killed | 2 | 10.00 s | 9.98 s | -0.20% | 5.00 | 5.00 |" in table
    assert table.endswith("2 runs; the largest deviation is -0.20% (killed).\n")


def _all(seconds: dict[str, float]) -> dict[str, float]:
    from drivetrain.record.ledger import CLASSES

    return {name: seconds.get(name, 0.0) for name in CLASSES}
