"""Pictures of outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.requirements import require
from drivetrain.plan.simulation.outcome import Outcome

_COLORS = ("tab:red", "tab:blue", "tab:green")


def plot_curve(curves: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Goodput against devices: the mean, and where 95% of runs lie."""
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


def plot_what_if(name: str, outcomes: Sequence[Outcome], path: Path) -> None:
    """Where the time goes, one bar per value."""
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
    axis.set_ylabel("part of the elapsed time")
    axis.set_xlabel(name)
    axis.legend(fontsize=8, loc="lower right")
    _save(plt, figure, path)


def _label(outcome: Outcome, name: str) -> str:
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
