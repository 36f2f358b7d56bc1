"""The best plans as bars: memory by component, a step's seconds by component."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.requirements import require
from drivetrain.plan.cost.estimate import Estimate
from drivetrain.plan.plan import Plan
from drivetrain.plan.show import distinct

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8c8c8c", "#c44e52", "#8172b3", "#937860", "#da8bc3")


def plot(plan: Plan, path: Path, top: int = 8) -> None:
    """Write a picture."""
    require("matplotlib", extra="plan")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = distinct(plan.ranked or plan.nearest_misses)[:top]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.6 + 0.5 * len(rows)), sharey=True)
    names = [
        f"{one.candidate.title}\nmicro-batch {one.candidate.micro_batch_size}, "
        f"recompute {one.candidate.recompute}"
        for one in rows
    ]
    _bars(left, names, rows, lambda one: one.memory.components(), 2**30)
    _bars(right, names, rows, lambda one: one.time.components(), 1.0)
    limit = rows[0].memory_limit_bytes / 2**30
    left.axvline(limit, color="black", linestyle="--", linewidth=1)
    left.set_xlabel(f"GiB on the fullest rank (dashed: {limit:.0f} GiB can be had)")
    right.set_xlabel("seconds a step")
    left.invert_yaxis()
    figure.suptitle(f"{plan.model} on {plan.cluster}: predicted")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(
    axes: Any,
    names: Sequence[str],
    rows: Sequence[Estimate],
    components: Callable[[Estimate], dict[str, float]],
    unit: float,
) -> None:
    kinds = list(dict.fromkeys(kind for one in rows for kind in components(one)))
    kinds = [kind for kind in kinds if any(components(one).get(kind, 0.0) > 0 for one in rows)]
    start = [0.0] * len(rows)
    for index, kind in enumerate(kinds):
        sizes = [components(one).get(kind, 0.0) / unit for one in rows]
        axes.barh(names, sizes, left=start, label=kind, color=_COLOURS[index % len(_COLOURS)])
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    axes.tick_params(axis="y", labelsize=8)
