"""The plan beside what was measured: every figure that both of them have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from drivetrain.view.figures import typical
from drivetrain.view.run_view import RunView


def planned_and_measured(run: RunView, plan: Mapping[str, Any]) -> RunView:
    """The run with its plan's rows; unchanged when there is no plan."""
    predicted = plan.get("prediction", plan)
    if not isinstance(predicted, Mapping):
        return run
    measured = {
        "step_s": (_step_s(run), "s"),
        "tokens_per_s": (typical(run, "throughput/tokens_per_sec"), "tokens/s"),
        "samples_per_s": (typical(run, "throughput/samples_per_sec"), "samples/s"),
    }
    rows = []
    for name, (value, unit) in measured.items():
        said = predicted.get(name)
        if value is not None and isinstance(said, int | float) and not isinstance(said, bool):
            rows.append((name.removesuffix("_s").replace("_per", ""), float(said), value, unit))
    return replace(run, plan=tuple(rows))


def _step_s(run: RunView) -> float | None:
    grid = run.ranks
    if grid is None:
        return None
    # compute, data and communication of the rank that took longest in each column
    longest = np.nanmax(np.sum([*grid.seconds.values()], axis=0), axis=0)
    return float(np.nanmedian(longest))
