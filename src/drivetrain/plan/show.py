"""Print a plan as a table with reasons and the settings to run it, or plot it as bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.requirements import require
from drivetrain.core.text import readable_bytes, readable_duration, readable_rate
from drivetrain.plan.cost.estimate import Estimate
from drivetrain.plan.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(plan: Plan, console: Console, top: int = 8) -> None:
    console.print(_headline(plan), markup=False)
    if plan.best is None:
        for line in _misses(plan):
            console.print(line, markup=False)
        return
    console.print(_table(distinct(plan.ranked)[:top]))
    for line in _reasons(plan):
        console.print(line, markup=False)


def distinct(ranked: Sequence[Estimate]) -> list[Estimate]:
    """Return the best of each layout and strategy, so that variants do not hide other plans."""
    seen: set[str] = set()
    kept = []
    for one in ranked:
        if one.candidate.title not in seen:
            seen.add(one.candidate.title)
            kept.append(one)
    return kept


def _headline(plan: Plan) -> str:
    return (
        f"{plan.model}: {_count(plan.num_parameters)} parameters on {plan.cluster} "
        f"({plan.num_devices} devices), {plan.question.global_batch_size} samples a step\n"
        f"{plan.num_considered:,} plans considered, {len(plan.ranked):,} fit; profiled in "
        f"{plan.seconds_to_profile:.1f} s, searched in {plan.seconds_to_search:.1f} s\n"
    )


def _table(rows: Sequence[Estimate]) -> Table:
    from rich.table import Table

    has_price = any(one.price_per_step is not None for one in rows)
    has_tokens = any(one.tokens_per_s is not None for one in rows)
    table = Table(box=None, pad_edge=False)
    for name in ("", "plan", "micro-batch", "recompute", "memory", "step"):
        is_left = name in ("plan", "")  # on a narrow screen, only the plan's name wraps
        table.add_column(name, no_wrap=name != "plan", justify="left" if is_left else "right")
    table.add_column("tokens/s" if has_tokens else "samples/s", justify="right", no_wrap=True)
    table.add_column("MFU", justify="right", no_wrap=True)
    if has_price:
        table.add_column("1,000 steps", justify="right", no_wrap=True)
    for number, one in enumerate(rows, 1):
        candidate = one.candidate
        words = [
            str(number),
            candidate.title,
            f"{candidate.micro_batch_size} × {candidate.accumulation}",
            candidate.recompute,
            readable_bytes(one.memory.total),
            seconds(one.time.total),
            readable_rate(one.tokens_per_s or one.samples_per_s),
            "" if one.utilization is None else f"{one.utilization:.0%}",
        ]
        if has_price:
            words.append("" if one.price_per_step is None else f"${one.price_per_step * 1000:,.0f}")
        table.add_row(*words)
    return table


def _reasons(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is None:
        return
    yield f"\nwhy: {plan.why}"
    for kind, reason in list(plan.why_not.items())[:6]:
        yield f"  {kind}: {reason}"
    if plan.changes:
        yield "another plan would win with"
        for change in plan.changes:
            yield f"  {change}"
    yield "memory of the fullest rank: " + _parts(best.memory.components(), readable_bytes)
    yield "a step: " + _parts(best.time.components(), seconds)
    if best.checkpoint_s is not None:
        size = readable_bytes(best.checkpoint_bytes)
        yield f"a checkpoint: {size}, {readable_duration(best.checkpoint_s)} to write"
    if plan.question.steps is not None:
        took = best.time.total * plan.question.steps
        cost = best.price_per_step
        money = "" if cost is None else f", ${cost * plan.question.steps:,.0f}"
        yield f"{plan.question.steps:,} steps: {readable_duration(took)}{money}"
    words = " ".join(f"{key}={value}" for key, value in best.candidate.settings().items())
    yield from plan.notes
    yield f"to run it: {words}"


def _misses(plan: Plan) -> Iterator[str]:
    yield "nothing fits"
    for one in distinct(plan.nearest_misses)[:3]:
        yield (
            f"  {one.candidate.title}, micro-batch {one.candidate.micro_batch_size}, recompute "
            f"{one.candidate.recompute}: needs {readable_bytes(one.memory.total)} per rank, and "
            f"{readable_bytes(one.memory_limit_bytes)} is available"
        )
        yield "    " + _parts(one.memory.components(), readable_bytes)


def _parts(components: dict[str, float], spoken: object) -> str:
    say = spoken if callable(spoken) else str
    named = [f"{name} {say(value)}" for name, value in components.items() if value > 0]
    return ", ".join(named)


def _count(number: int) -> str:
    """Format a number of parameters; small ones in full, because in millions they would be 0.0."""
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def seconds(value: float) -> str:
    """Format seconds with three digits."""
    if value >= 100:
        return readable_duration(value)
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


# The best plans as bars: memory by component, a step's seconds by component.

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8c8c8c", "#c44e52", "#8172b3", "#937860", "#da8bc3")


def plot(plan: Plan, path: Path, top: int = 8) -> None:
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
    left.set_xlabel(f"GiB on the fullest rank (dashed: {limit:.0f} GiB available)")
    right.set_xlabel("seconds per step")
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
