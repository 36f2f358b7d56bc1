"""Results as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.patterns.compare import Curve, distance, is_rest_of
from benchmarks.patterns.running import ARMS

Result = Mapping[str, Any]
_COLOURS = ("#888888", "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#d62728", "#17becf")


def curve(entry: Mapping[str, Any]) -> Curve:
    return Curve(entry["losses"], entry["metrics"])


def verdicts(result: Result) -> list[str]:
    """Each arm's: the distance to the original, or whether the kill changed a bit."""
    before, arms = curve(result["original"]), result["arms"]
    cells = [f"{distance(before, curve(arms[arm.name])):.1e}" for arm in ARMS if not arm.is_killed]
    for arm in ARMS:
        if arm.is_killed:
            cut, whole = arms[arm.name], arms[arm.name.removesuffix(", killed")]
            same = is_rest_of(curve(cut), curve(whole))
            same &= cut["weights_sha256"] == whole["weights_sha256"]
            cells.append(f"{'equal' if same else 'DIFFERENT'}, from {cut['resumed_at'][-1]}")
    return cells


def row(name: str, result: Result) -> str:
    steps = len(result["original"]["losses"])
    gone, came = result["lines"]
    cells = " | ".join(verdicts(result))
    return f"| {name} | {result['shows']} | {steps} | {cells} | -{gone} +{came} |"


def table(results: Mapping[str, Result]) -> str:
    heads = ["pattern", "what it has", "steps", *(arm.name for arm in ARMS), "lines"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    return "\n".join([*lines, *(row(name, result) for name, result in results.items())]) + "\n"


def draw(results: Mapping[str, Result], path: Path, columns: int = 3) -> None:
    """Every pattern's curves over each other: thick below, thin above."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(results) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4 * columns, 2.7 * rows), squeeze=False)
    handles: Sequence[Any] = ()
    for place, (name, result) in zip(grid.flat, results.items(), strict=False):
        curves = {"original": result["original"], **result["arms"]}
        for number, (label, entry) in enumerate(curves.items()):
            begun = max((0, *entry.get("resumed_at", ())))
            steps = range(begun + 1, begun + len(entry["losses"]) + 1)
            width = max(0.8, 9.0 - 1.3 * number)
            colour = _COLOURS[number % len(_COLOURS)]
            place.plot(steps, entry["losses"], color=colour, linewidth=width, label=label)
            for step in entry.get("resumed_at", ()):
                place.axvline(step + 0.5, color="#bbbbbb", linewidth=0.8, zorder=0)
        place.set_title(name, fontsize=10)
        place.tick_params(labelsize=8)
        handles = handles or place.get_legend_handles_labels()[0]
    for place in list(grid.flat)[len(results) :]:
        place.axis("off")
    labels = [handle.get_label() for handle in handles]
    across = min(len(labels), 2 * columns + 1)
    figure.legend(handles, labels, loc="lower center", ncol=across, fontsize=8, frameon=False)
    figure.supylabel("loss", fontsize=9)
    room = 0.2 * -(-len(labels) // across) / figure.get_figheight()
    figure.tight_layout(rect=(0.01, room, 1, 1))
    figure.savefig(path, dpi=110)
