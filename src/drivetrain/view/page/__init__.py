"""Pages: self-contained HTML files, for light and dark mode and any width."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from drivetrain._version import __version__
from drivetrain.core.text import readable_bytes
from drivetrain.record.expert_load import LayerShape, shape_of
from drivetrain.view.charts import (
    ChartLine,
    Curve,
    css_of_kind,
    curve,
    heat,
    ledger_bar,
    ledger_over_time,
    ledger_table,
    timeline,
)
from drivetrain.view.compare import RunComparison
from drivetrain.view.palette import COLOURS, SHADES, UNKNOWN, Colour, css_of, words
from drivetrain.view.run_view import CheckpointView, RankGrid, RunView
from drivetrain.view.series import (
    ChartSeries,
    duration_text,
    is_about_the_machine,
    is_drawn,
    number_text,
    order_of,
    title_of,
)
from drivetrain.view.summary import as_sentence, key_figures, verdict

# Pages: one run, or two side by side, as one file without external resources.

# Templates: Jinja2, which escapes everything that is not marked as safe.


def render(name: str, values: Mapping[str, Any]) -> str:
    """Render a page; a name that the template lacks is an error."""
    environment = Environment(
        loader=PackageLoader("drivetrain.view.page", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)


def style_sheet() -> Markup:
    """Return the style sheet, to be embedded in the page."""
    written = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return Markup(written + _palette())  # noqa: S704 - both are our own, and CSS is not HTML


def _palette() -> str:
    colours = {**COLOURS, "unknown": UNKNOWN}
    shades = {f"shade-{index}": shade for index, shade in enumerate(SHADES)}
    by_variable: dict[str, Colour] = {name.replace("_", "-"): c for name, c in colours.items()}
    by_variable |= shades
    light = "".join(f"--{name}:{colour.light};" for name, colour in by_variable.items())
    dark = "".join(f"--{name}:{colour.dark};" for name, colour in by_variable.items())
    rules = [f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"]
    classes = {css_of(name): name.replace("_", "-") for name in colours} | {s: s for s in shades}
    rules += [
        f".{css}{{fill:var(--{name});background:var(--{name})}}" for css, name in classes.items()
    ]
    return "\n".join(rules)


# The report: a run as one page.

_SHOWN_CHECKPOINTS = 12


@dataclass(frozen=True)
class Drawing:
    """A chart with a title and a note."""

    title: str
    note: str
    drawing: Markup


def report_page(run: RunView, made_s: float) -> str:
    return render(
        "report.html.j2",
        {
            "run": run,
            "style": style_sheet(),
            "verdict": verdict(run),
            "when": _when(run),
            "figures": key_figures(run),
            "curves": _curves(run, of_machine=False),
            "machine_curves": _curves(run, of_machine=True),
            "has_resumes": any(_resumes(run, series) for series in run.scalars.values()),
            "ledger": _ledger(run),
            "experts": _experts(run),
            "heats": _heats(run.ranks),
            "heat_note": "" if run.ranks is None else _heat_note(run.ranks),
            "timeline": timeline(run) if run.attempts else "",
            "checkpoint_sentence": _checkpoint_sentence(run.checkpoints),
            "shown_checkpoints": list(run.checkpoints)[-_SHOWN_CHECKPOINTS:][::-1],
            "refers": any(save.referred_bytes for save in run.checkpoints),
            "chosen": [(k, v, s) for k, (v, s) in run.config.items() if not _is_open(s)],
            "defaults": [(k, v) for k, (v, s) in run.config.items() if _is_open(s)],
            "css_of_kind": css_of_kind,
            "duration": duration_text,
            "size": readable_bytes,
            "number": number_text,
            "sentence": as_sentence,
            "version": __version__,
            "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(made_s)),
        },
    )


def _is_open(source: str) -> bool:
    """True for a value that nobody set, or that has no effect in this run."""
    return source.startswith(("default", "unused"))


def curve_of(lines: Sequence[ChartLine], marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """Return the chart for a scalar, in the style that its name implies."""
    name = lines[0].series.name
    is_rate = name.startswith(("throughput/", "system/", "train/learning_rate"))
    is_noisy = name.startswith("throughput/") or name in ("train/loss", "train/grad_norm")
    return curve(Curve(title_of(name), lines, is_rate, is_noisy, marks))


def _curves(run: RunView, *, of_machine: bool) -> list[Drawing]:
    return [
        Drawing(
            title_of(name),
            _last_of(series),
            curve_of([ChartLine(series)], _resumes(run, series)),
        )
        for name, series in sorted(run.scalars.items(), key=lambda item: order_of(item[0]))
        if is_drawn(name) and is_about_the_machine(name) == of_machine and not series.is_empty
    ]


def _resumes(run: RunView, series: ChartSeries) -> list[tuple[float, str]]:
    """Return the steps of the curve at which an attempt resumed from a checkpoint."""
    begun = [(float(each.first_step), each.number) for each in run.attempts[1:]]
    return [
        (step, f"attempt {number} resumes")
        for step, number in begun
        if step > 1 and not series.is_empty and series.steps[0] <= step <= series.steps[-1]
    ]


def _last_of(series: ChartSeries) -> str:
    broken = series.broken_steps.size
    said = f"{number_text(series.last)} at step {series.steps[-1]:,.0f}"
    return f"{said}; {broken:,} not finite" if broken else said


def _ledger(run: RunView) -> dict[str, Any] | None:
    if run.ledger is None or not run.ledger.wall_s:
        return None
    return {
        "bar": ledger_bar(run.ledger),
        "table": ledger_table(run.ledger),
        "over_time": ledger_over_time(run.ledger),
    }


_SHOWN_LAYERS = 32


def _experts(run: RunView) -> list[LayerShape]:
    """Return the layers' loads, the most uneven first."""
    layers = {} if run.expert_load is None else run.expert_load.layers
    shapes = [shape_of(name, tokens) for name, tokens in layers.items()]
    return sorted(shapes, key=lambda shape: -shape.busiest)[:_SHOWN_LAYERS]


def _heats(grid: RankGrid | None) -> list[Drawing]:
    if grid is None:
        return []
    drawn = []
    for part, seconds in grid.seconds.items():
        known = seconds[np.isfinite(seconds)]
        if known.size:
            note = f"median {duration_text(float(np.median(known)))} per step"
            drawn.append(Drawing(words(part).capitalize(), note, heat(grid, part)))
    return drawn


def _heat_note(grid: RankGrid) -> str:
    per_row = max(np.diff(grid.rank_edges))
    per_column = max(np.diff(grid.step_edges))
    column = f"the mean of {per_column:,} steps" if per_column > 1 else "a step"
    if per_row > 1:
        return f"A row is the slowest of {per_row:,} ranks, a column is {column}."
    return f"A row is a rank, a column is {column}."


def _checkpoint_sentence(saves: Sequence[CheckpointView]) -> str:
    if not saves:
        return ""
    blocked_s = sum(save.blocked_s for save in saves)
    shown = f"; the last {_SHOWN_CHECKPOINTS}" if len(saves) > _SHOWN_CHECKPOINTS else ""
    noun = "checkpoint" if len(saves) == 1 else "checkpoints"
    return f"{len(saves):,} {noun} blocked training for {duration_text(blocked_s)} in total{shown}:"


def _when(run: RunView) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.start_s))
    ended = time.strftime("%H:%M:%S", time.localtime(run.end_s))
    return f"{began} to {ended}" if run.state != "running" else f"since {began}"


# Two runs as one page: curves overlaid, tables side by side.


def compare_page(comparison: RunComparison, made_s: float) -> str:
    sides = (comparison.here, comparison.there)
    return render(
        "compare.html.j2",
        {
            "comparison": comparison,
            "names": comparison.names,
            "style": style_sheet(),
            "curves": _curves_of_both(comparison),
            "bars": ["" if run.ledger is None else ledger_bar(run.ledger) for run in sides],
            "version": __version__,
            "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(made_s)),
        },
    )


def _curves_of_both(comparison: RunComparison) -> list[Drawing]:
    sides = ((comparison.here, "line-1"), (comparison.there, "line-2"))
    drawn = []
    names = {*comparison.here.scalars, *comparison.there.scalars}
    for name in sorted(filter(is_drawn, names), key=order_of):
        lines = [ChartLine(run.scalar(name), css) for run, css in sides]
        shown = [line for line in lines if not line.series.is_empty]
        note = "" if len(shown) == 2 else f"only in {_only(comparison, name)}"
        drawn.append(Drawing(title_of(name), note, curve_of(shown)))
    return drawn


def _only(comparison: RunComparison, name: str) -> str:
    return comparison.names[comparison.here.scalar(name).is_empty]
