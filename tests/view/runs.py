"""Runs made of values, for what only draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from drivetrain.view.run_view import (
    AttemptView,
    CheckpointView,
    EventView,
    LedgerView,
    RankGrid,
    RankMeans,
    RunView,
)
from drivetrain.view.series import make_series

HOSTILE = "</style><script>alert('x')</script>\"><img src=x onerror=y>&amp;"


def attempt(number: int, start_s: float, end_s: float, **changes: Any) -> AttemptView:
    given: dict[str, Any] = {
        "kind": "finished",
        "first_step": 1,
        "last_step": 100,
        "num_ranks": 2,
        "host": "node-0",
        "what": "",
    }
    return AttemptView(number, start_s, end_s, **(given | changes))


def ledger(**seconds: float) -> LedgerView:
    over_time = {name: np.full(4, each / 4) for name, each in seconds.items()}
    return LedgerView(seconds, np.linspace(0, sum(seconds.values()), 5), over_time)


def grid(num_rows: int = 2, num_columns: int = 5) -> RankGrid:
    values = np.full((num_rows, num_columns), 0.2, np.float32)
    return RankGrid(
        list(range(num_rows + 1)),
        list(range(1, num_columns + 2)),
        {"compute": values, "data_wait": values * 0.1, "communication": values * 0.2},
    )


def means(num_ranks: int, slow: int | None = None) -> RankMeans:
    compute = np.full(num_ranks, 0.2)
    if slow is not None:
        compute[slow] = 0.3
    parts = {
        "compute": compute,
        "data_wait": np.full(num_ranks, 0.02),
        "communication": np.full(num_ranks, 0.05),
    }
    return RankMeans(range(num_ranks), num_ranks, parts, compute + 0.08)


def run_view(**changes: Any) -> RunView:
    steps = np.arange(1, 101)
    given: dict[str, Any] = {
        "name": "digits",
        "state": "finished",
        "start_s": 1000.0,
        "end_s": 1060.0,
        "step": 100,
        "total_steps": 100,
        "scalars": {
            "train/loss": make_series("train/loss", steps, 2.0 / steps),
            "throughput/samples_per_sec": make_series(
                "throughput/samples_per_sec", steps, np.full(100, 512.0)
            ),
        },
        "attempts": [
            attempt(1, 1000.0, 1030.0, kind="failed", last_step=60, what="rank 1 was killed"),
            attempt(2, 1035.0, 1060.0, first_step=51),
        ],
        "checkpoints": [CheckpointView(50, 1, 1028.0, 0.2, 1.5)],
        "ledger": ledger(productive=48.0, start_up=4.0, recovery=5.0, redone=3.0),
        "ranks": grid(),
        "recent": means(2),
        "events": [EventView(1000.0, "attempt 1 begins"), EventView(1028.0, "step 50: saved")],
        "facts": {"host": "node-0", "torch": "2.13.0"},
        "config": {"seed": ("42", "default"), "max_steps": ("100", "command line")},
    }
    return RunView(**(given | changes))
