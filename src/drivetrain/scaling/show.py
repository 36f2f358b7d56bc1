"""Present lines as a table and as a plot. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.requirements import require
from drivetrain.core.statistics import MedianInterval
from drivetrain.scaling.request import AGAIN, BARE, OURS, Line, ScalingRequest

_WIDTHS = (8, 6, 22, 10, 20, 20, 22, 12, 16)
_TITLES = (
    ("mode", "ranks", "arm", "step", "speed-up", "efficiency", "step / bare", "losses", "plan"),
    ("", "", "", "(ms)", "(95%)", "(%, 95%)", "(same round, 95%)", "(difference)", "(ms, error)"),
)
_BARE_NAMES = {"ddp": "DDP", "fsdp": "FSDP2"}


def heading(asked: ScalingRequest, about: Mapping[str, Any]) -> Iterator[str]:
    yield "# " + ", ".join(f"{name} {value}" for name, value in about.items())
    if asked.emulate_compute_ms is not None:
        yield (
            f"# emulated: {asked.emulate_compute_ms:g} ms of a step is sleep, not compute; "
            "this measures synchronization, not devices"
        )
    for titles in _TITLES:
        yield "# " + _columns(titles)[2:]


def line(one: Line) -> str:
    """Return one row of the table."""
    plan = "" if one.predicted_s is None or one.arm != OURS else _plan(one)
    apart = "same bits" if one.loss_difference == 0 else f"{one.loss_difference:.0e}"
    return _columns(
        (
            one.mode,
            str(one.num_ranks),
            name_of(one),
            f"{one.step_s * 1e3:.2f}",
            _interval(one.speedup, 2),
            _interval(one.efficiency, 1, 100.0),
            "1" if one.to_bare is None else _interval(one.to_bare, 3),
            apart if one.is_same_training else f"{apart} !",
            plan,
        )
    )


def name_of(one: Line) -> str:
    """Return the display name of an arm, for example `bare DDP again`."""
    engine = _BARE_NAMES.get(one.strategy, one.strategy)
    names = {
        OURS: f"{OURS} {one.strategy}",
        BARE: f"bare {engine}",
        AGAIN: f"bare {engine} again",
        "ray": "Ray Train",
        "horovod": "Horovod",
    }
    return names.get(one.arm, one.arm)


def summary(lines: Sequence[Line]) -> Iterator[str]:
    others = [each for each in lines if not each.is_same_training]
    if others:
        named = ", ".join(f"{name_of(each)} on {each.num_ranks} ({each.mode})" for each in others)
        yield f"# losses differ from those of one process on the same samples: {named}"
    else:
        worst = max(each.loss_difference for each in lines)
        yield f"# losses: all arms match one process (largest difference {worst:.0e})"


def _plan(one: Line) -> str:
    predicted = one.predicted_s or 0.0
    return f"{predicted * 1e3:.2f} ({predicted / one.step_s - 1:+.0%})"


def _interval(value: MedianInterval, decimals: int, scale: float = 1.0) -> str:
    low, high = (f"{each * scale:.{decimals}f}" for each in (value.low, value.high))
    return f"{value.value * scale:.{decimals}f} ({low}-{high})"


def _columns(words: Sequence[str]) -> str:
    return "".join(f"  {word:>{width}}" for word, width in zip(words, _WIDTHS, strict=True))


def plot(
    lines: Sequence[Line], asked: ScalingRequest, about: Mapping[str, Any], path: Path
) -> None:
    """Plot speed-up and efficiency by ranks, one row of plots per mode; dashed: predicted."""
    require("matplotlib", extra="plan")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(asked.modes), 2, figsize=(13, 1 + 4.2 * len(asked.modes)), squeeze=False
    )
    for mode, (left, right) in zip(asked.modes, all_axes, strict=True):
        of_mode = [each for each in lines if each.mode == mode]
        sizes = sorted({each.num_ranks for each in of_mode})
        left.plot(sizes, sizes, ":", color="black", lw=0.8, label="ideal")
        _curves(of_mode, left, right)
        for axes, title in ((left, f"{mode}: speed-up"), (right, f"{mode}: efficiency, %")):
            axes.set_title(title, fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.set_xlabel("ranks")
        left.set_yscale("log", base=2)
        left.set_yticks(sizes, [str(size) for size in sizes])
        right.set_ylim(bottom=0)
        right.legend(fontsize=8, loc="lower left")
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    if asked.emulate_compute_ms is not None:
        title += f"\nemulated: {asked.emulate_compute_ms:g} ms of a step is sleep, not compute"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(lines: Sequence[Line], left: Any, right: Any) -> None:
    names = list(dict.fromkeys(name_of(each) for each in lines))
    for index, name in enumerate(names):
        of_arm = [each for each in lines if name_of(each) == name]
        style = {"color": f"C{index}", "marker": "o", "ms": 4, "capsize": 3, "lw": 1.2}
        # shifted sideways, so that they do not hide each other
        aside = [each.num_ranks * 2 ** (0.03 * (index - len(names) / 2)) for each in of_arm]
        for axes, values, scale in (
            (left, [each.speedup for each in of_arm], 1.0),
            (right, [each.efficiency for each in of_arm], 100.0),
        ):
            middle = [each.value * scale for each in values]
            below = [(each.value - each.low) * scale for each in values]
            above = [(each.high - each.value) * scale for each in values]
            axes.errorbar(aside, middle, yerr=[below, above], label=name, **style)
        planned = [each for each in of_arm if each.predicted_s and each.arm == OURS]
        if planned:
            ranks = [each.num_ranks for each in planned]
            faster = [each.step_s / (each.predicted_s or 1.0) for each in planned]
            speedups = [each.speedup.value * f for each, f in zip(planned, faster, strict=True)]
            parts = [each.efficiency.value * f for each, f in zip(planned, faster, strict=True)]
            label = f"planned, {planned[0].strategy}"
            left.plot(ranks, speedups, "--", color=f"C{index}", lw=0.9)
            right.plot(
                ranks, [100 * p for p in parts], "--", color=f"C{index}", lw=0.9, label=label
            )
