"""The plan beside what was measured: every figure that both of them have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.view.figures import typical
from drivetrain.view.run_view import RunView


def planned_and_measured(run: RunView, plan: Mapping[str, Any]) -> RunView:
    """The run with its plan's rows; unchanged when there is no plan."""
    if not plan.get("plans"):
        return run
    best, samples = plan["plans"][0], plan["question"]["global_batch_size"]
    samples_per_s = typical(run, "throughput/samples_per_sec")
    if not samples_per_s:
        return run
    rows = (
        ("step", float(best["step_s"]["total"]), samples / samples_per_s, "s"),
        ("samples", float(best["samples_per_s"]), samples_per_s, "samples/s"),
    )
    return replace(run, plan=rows)
