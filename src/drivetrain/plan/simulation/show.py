"""Show outcomes as text, as data for programs, and as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain.core.requirements import require
from drivetrain.plan.simulation.inputs import DAY_S, HOUR_S, Inputs, option
from drivetrain.plan.simulation.outcome import MeanOverRuns, SimulatedOutcome
from drivetrain.plan.simulation.published import Published


def lines(outcome: SimulatedOutcome) -> list[str]:
    """Return one outcome with all its inputs, as lines of text."""
    inputs = outcome.inputs
    shown = [
        f"{inputs.num_nodes:,} nodes × {inputs.devices_per_node} for {inputs.days:g} days, "
        f"{inputs.replications} simulated runs (seed {inputs.seed})",
        *(f"  {line}" for line in _stated(inputs)),
        "",
        f"  goodput   {_percent(outcome.goodput)}; the mean is known to "
        f"±{outcome.goodput.error:.2%}",
        f"  failures  {outcome.failures.mean:,.0f} ({outcome.failures.low:,.0f} to "
        f"{outcome.failures.high:,.0f})",
    ]
    if outcome.closed_form is not None:
        shown.append(f"  Daly's formula gives {outcome.closed_form:.2%}")
    shown += [f"  lost to {name:<18} {part:6.2%}" for name, part in _ranked(outcome.lost)]
    if outcome.money is not None:
        money = outcome.money
        shown += [
            "",
            f"  paid      {money.paid:,.0f}, of which {money.lost.mean:,.0f} wasted "
            f"({money.lost.low:,.0f} to {money.lost.high:,.0f})",
            f"  a useful device-hour costs {money.per_useful_hour.mean:.3f} "
            f"({money.per_useful_hour.low:.3f} to {money.per_useful_hour.high:.3f})",
        ]
    return shown


def what_if_table(name: str, outcomes: Sequence[SimulatedOutcome]) -> list[str]:
    """Return a table with one row per value of one input."""
    rows = [f"  {option(name):>22}  goodput (95% of runs)      largest loss"]
    for outcome in outcomes:
        value = getattr(outcome.inputs, name)
        if value is None:
            value = f"auto ({duration(outcome.inputs.checkpoint_interval_s)})"
        elif name.endswith("_s"):
            value = duration(value)
        largest = next(iter(_ranked(outcome.lost)), ("nothing", 0.0))
        rows.append(
            f"  {value!s:>22}  {_percent(outcome.goodput):<25}  {largest[0]} {largest[1]:.2%}"
        )
    return rows


def published_table(results: Sequence[tuple[Published, SimulatedOutcome]]) -> list[str]:
    """Return a Markdown table of reported and simulated goodput."""
    rows = ["| run | reported | simulated (95% of runs) | off by |", "| --- | ---: | ---: | ---: |"]
    for run, outcome in results:
        reported = f"{'> ' if run.is_bound else ''}{run.reported:.0%}"
        off = (outcome.goodput.mean - run.reported) * 100
        is_met = run.is_bound and off >= 0
        rows.append(
            f"| {run.name} | {reported} | {_percent(outcome.goodput)} | "
            f"{'holds' if is_met else f'{off:+.1f} points'} |"
        )
    return rows


def as_dict(outcome: SimulatedOutcome) -> dict[str, Any]:
    """Return an outcome for programs; times in seconds."""
    return {
        **asdict(outcome),
        "mtbf_s": outcome.inputs.mtbf_s,
        "checkpoint_interval_s": outcome.inputs.checkpoint_interval_s,
    }


def duration(value_s: float) -> str:
    """Format seconds in a readable unit."""
    for size, unit in ((365 * DAY_S, "years"), (DAY_S, "days"), (HOUR_S, "h"), (60.0, "min")):
        if value_s >= 2 * size:
            return f"{value_s / size:.4g} {unit}"
    return f"{value_s:g} s"


def _stated(inputs: Inputs) -> list[str]:
    every = f"{duration(inputs.checkpoint_interval_s)}"
    chosen = "given" if inputs.interval_s is not None else "Daly's optimum"
    said = [
        f"a node fails every {duration(inputs.node_mtbf_s)}, so one of them every "
        f"{duration(inputs.mtbf_s)}; {inputs.hardware:.0%} of failures take a node out for "
        f"{duration(inputs.repair_s)}; {inputs.spares} spares",
        f"policy {inputs.policy}: detected in {duration(inputs.detect_s)}, restarted in "
        f"{duration(inputs.restart_s)}"
        + (
            f"; the other {inputs.num_replicas - 1} replicas stall {duration(inputs.stall_s)}"
            if inputs.policy == "live"
            else ""
        ),
        f"a step takes {duration(inputs.step_time_s)}; a checkpoint every {every} ({chosen}) "
        f"blocks training for {duration(inputs.save_s)}",
    ]
    if inputs.correlated_per_day:
        said.append(
            f"{inputs.correlated_per_day:g} times a day {inputs.correlated_nodes} nodes fail "
            "at once"
        )
    if inputs.straggler_mtbf_s is not None:
        said.append(
            f"a node becomes slow every {duration(inputs.straggler_mtbf_s)}, for "
            f"{duration(inputs.straggler_s)}; steps then take "
            f"{inputs.straggler_slowdown:g} times as long"
        )
    return said


def _ranked(lost: dict[str, float]) -> list[tuple[str, float]]:
    parts = [(name, part) for name, part in lost.items() if part > 1e-6]
    return sorted(parts, key=lambda item: -item[1])


def _percent(estimate: MeanOverRuns) -> str:
    return f"{estimate.mean:.1%} ({estimate.low:.1%} to {estimate.high:.1%})"


def curve_table(curves: Mapping[str, Sequence[SimulatedOutcome]]) -> list[str]:
    """Return a Markdown table of goodput by policy and number of devices."""
    names = list(curves)
    rows = ["| devices | " + " | ".join(name.split(":")[0] for name in names) + " |"]
    rows.append("| ---: |" + " ---: |" * len(names))
    for outcomes in zip(*curves.values(), strict=True):
        cells = " | ".join(_percent(outcome.goodput) for outcome in outcomes)
        rows.append(f"| {outcomes[0].inputs.num_devices:,} | {cells} |")
    return rows


# Plots of outcomes.

_COLORS = ("tab:red", "tab:blue", "tab:green")


def plot_curve(curves: Mapping[str, Sequence[SimulatedOutcome]], path: Path) -> None:
    """Plot goodput by number of devices: the mean, and the range of 95% of runs."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.4))
    for color, (name, outcomes) in zip(_COLORS, curves.items(), strict=False):
        devices = [outcome.inputs.num_devices for outcome in outcomes]
        axis.plot(devices, [o.goodput.mean for o in outcomes], "o-", color=color, label=name)
        low, high = ([getattr(o.goodput, end) for o in outcomes] for end in ("low", "high"))
        axis.fill_between(devices, low, high, color=color, alpha=0.15)
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    axis.set_xlabel("devices")
    axis.set_ylabel("goodput: useful time / elapsed time")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower left")
    _save(plt, figure, path)


def plot_what_if(name: str, outcomes: Sequence[SimulatedOutcome], path: Path) -> None:
    """Plot where the time goes, one bar per value."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.0))
    labels = [_label(outcome, name) for outcome in outcomes]
    floor = [0.0] * len(outcomes)
    parts = {"useful": [o.goodput.mean for o in outcomes]}
    for part in outcomes[0].lost:
        parts[part] = [o.lost[part] for o in outcomes]
    for part, heights in parts.items():
        if max(heights) > 1e-4:
            color = "tab:green" if part == "useful" else None
            axis.bar(labels, heights, bottom=floor, label=part, color=color)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
    axis.set_ylabel("fraction of the elapsed time")
    axis.set_xlabel(name)
    axis.legend(fontsize=8, loc="lower right")
    _save(plt, figure, path)


def _label(outcome: SimulatedOutcome, name: str) -> str:
    value = getattr(outcome.inputs, name)
    return "auto" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _pyplot() -> Any:
    require("matplotlib", extra="simulate").use("Agg")
    return require("matplotlib.pyplot", extra="simulate")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
