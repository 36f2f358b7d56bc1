"""From raw samples to a table and a plot: every arm against the baseline of the same round."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.core.statistics import MedianInterval, paired_difference, paired_ratio

PROCESSOR = ", processor time"
"""A training's name ends in it where seconds of all threads' processor time are meant."""
TRAINING_THREAD = ", processor time of the training thread"
Samples = Mapping[str, Mapping[str, list[float]]]
"""training → arm → seconds per step, round by round"""


def report(output: Path) -> str:
    """Write table.md and plot.png next to samples.json; the table."""
    document = json.loads((output / "samples.json").read_text())
    samples, baseline = document["seconds_per_step"], document["baseline"]
    table = make_table(samples, baseline, document["machine"])
    (output / "table.md").write_text(table)
    by_the_clock = {
        training: by_arm for training, by_arm in samples.items() if PROCESSOR not in training
    }
    _plot(by_the_clock, baseline, output / "plot.png")
    return table


def make_table(samples: Samples, baseline: str, machine: Mapping[str, Any]) -> str:
    """Medians over rounds, paired with the baseline, with bootstrap 95% intervals."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "",
        f"Ratio and difference: medians over rounds, paired with the block of `{baseline}` in the "
        f"same round, with bootstrap 95% intervals. `{baseline} again` is the A/A arm.",
        "",
        f"| training | arm | median step | ratio to {baseline} | difference per step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for training, by_arm in samples.items():
        for arm, values in by_arm.items():
            cells = [training, arm, f"{median(values) * 1e3:.3f} ms", "1", ""]
            if arm != baseline:
                cells[3] = _ratio(paired_ratio(values, by_arm[baseline]))
                cells[4] = _microseconds(paired_difference(values, by_arm[baseline]))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(estimate: MedianInterval) -> str:
    return f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f})"


def _microseconds(estimate: MedianInterval) -> str:
    value, low, high = (x * 1e6 for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:+.0f} µs ({low:+.0f} to {high:+.0f})"


def _plot(samples: Samples, baseline: str, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(samples))
    rows = -(-len(samples) // columns)
    size = (4.2 * columns, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(samples) :]:
        axis.set_visible(False)
    for axis, (training, by_arm) in zip(axes.flat, samples.items(), strict=False):
        _plot_training(axis, by_arm, baseline)
        axis.set_title(training, fontsize=10)
        axis.set_xlabel(f"step time / {baseline}, same round")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_training(axis: Any, by_arm: Mapping[str, list[float]], baseline: str) -> None:
    """One row per arm: each round as a dot, the median with its interval on top."""
    arms = [arm for arm in by_arm if arm != baseline]
    everything: list[float] = []
    for row, arm in enumerate(arms):
        ratios = [a / b for a, b in zip(by_arm[arm], by_arm[baseline], strict=True)]
        everything += ratios
        axis.scatter(ratios, [row] * len(ratios), s=8, alpha=0.3, color="tab:gray")
        estimate = paired_ratio(by_arm[arm], by_arm[baseline])
        error = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
        color = "tab:blue" if "again" not in arm else "black"
        axis.errorbar(estimate.value, row, xerr=error, fmt="o", color=color, capsize=3, zorder=3)
    everything.sort()
    low, high = everything[len(everything) // 33], everything[-1 - len(everything) // 33]
    axis.set_xlim(low * 0.98, high * 1.02)
    axis.set_ylim(-0.6, len(arms) - 0.4)
    axis.set_yticks(range(len(arms)), arms)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")


def machine() -> dict[str, Any]:
    """What a measurement that is over was made on."""
    import torch

    return {
        "cores": os.cpu_count(),
        "load average at the end": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
