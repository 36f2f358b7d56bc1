"""The figures at the top: the few numbers somebody asks for first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.core.text import readable_rate
from drivetrain.view.run_view import RunView
from drivetrain.view.scale import duration_text, number_text

_RATES = (("throughput/tokens_per_sec", "tokens/s"), ("throughput/samples_per_sec", "samples/s"))


def key_figures(run: RunView) -> list[tuple[str, str]]:
    """(name, value) of what there is."""
    is_through = run.total_steps is None or run.step >= run.total_steps
    of = "" if is_through else f" of {run.total_steps:,}"
    shown = [("steps", f"{run.step:,}{of}"), ("wall clock", duration_text(run.wall_s))]
    if run.ledger is not None and run.ledger.wall_s:
        shown.append(("goodput", f"{run.ledger.share('productive'):.1%}"))
    loss = run.scalar("train/loss")
    if not loss.is_empty:
        shown.append(("loss", number_text(loss.last)))
    for name, unit in _RATES:
        rate = typical(run, name)
        if rate is not None:
            shown.append((unit, readable_rate(rate)))
            break
    if run.attempts:
        shown.append(("ranks", f"{run.attempts[-1].num_ranks:,}"))
        shown.append(("attempts", f"{len(run.attempts):,}"))
    return shown


def typical(run: RunView, name: str) -> float | None:
    """The median: a rate's mean is drawn down by the one slow start."""
    values = sorted(v for v in run.scalar(name).values.tolist() if math.isfinite(v))
    return values[len(values) // 2] if values else None


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
