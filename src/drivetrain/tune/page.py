"""A study as one HTML page in the style of a run's report: history, curves, parameters, trials."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from markupsafe import Markup

from drivetrain._version import __version__
from drivetrain.tune import decide, importance, pareto, pareto_chart
from drivetrain.tune.journal import Ended, State, read_journal
from drivetrain.tune.pareto_chart import Across
from drivetrain.tune.rows import Row, rows_of
from drivetrain.tune.rows import best_first as best_rows_first
from drivetrain.tune.settings import Study
from drivetrain.tune.space import Choice, Parameter, Scalar, short_key
from drivetrain.tune.stopping import best_first
from drivetrain.view.charts import (
    NUM_SHADES,
    SIZE,
    ChartFrame,
    Tick,
    across,
    box,
    framed,
    legend,
    up,
)
from drivetrain.view.page import Drawing, render, style_sheet
from drivetrain.view.series import Scale, number_text, step_ticks, ticks, value_scale

_WIDE = 8
_FAINTEST = 2
"""Fainter shades are hardly visible on the page."""


def study_page(study: Study, made_s: float, *, has_trials: bool = True) -> str:
    """Render the study; `has_trials=False` leaves out its table of trials."""
    settings, state = study.settings, read_journal(study.path)
    rows = rows_of(study)
    best = decide.best(settings, state)
    return render(
        "study.html.j2",
        {
            "name": study.path.absolute().name,
            "style": style_sheet(),
            "verdict": _verdict(study, best),
            "figures": _figures(study, rows),
            "charts": charts(study, state),
            "rows": best_rows_first(study, rows) if has_trials else [],
            "keys": list(study.space.parameters),
            "short": short_key,
            "number": _shown,
            "metrics": [each.metric for each in settings.objectives],
            "command": f"drivetrain tune show {study.path}",
            "version": __version__,
            "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(made_s)),
        },
    )


def _shown(value: Scalar) -> str:
    return number_text(value) if isinstance(value, float) else "" if value is None else str(value)


def _verdict(study: Study, found: Sequence[Ended]) -> str:
    if not found:
        return "No trial has a result yet."
    settings, best = study.settings, found[0]
    if settings.further:
        names = ", ".join(f"{each.metric} ({each.mode})" for each in settings.objectives)
        trials = "1 trial is" if len(found) == 1 else f"{len(found):,} trials are"
        return f"Objectives: {names}. {trials} on the Pareto front; no other is better in all."
    said = f"Trial {best.trial} is the best: {settings.metric} {best.value:.6g} after step "
    said += f"{best.step:,}."
    if settings.rungs:
        steps = ", ".join(f"{step:,}" for step in settings.rungs)
        said += f" Judged at step {steps} by {settings.stopping} ({settings.promote})."
    return said


def _figures(study: Study, rows: Sequence[Row]) -> list[tuple[str, str]]:
    settings, states = study.settings, Counter(row.state for row in rows)
    asked = f"{len(rows):,} of {settings.num_trials:,}"
    figures = [("trials", asked), ("sampler", settings.sampler)]
    return figures + [(name, f"{count:,}") for name, count in sorted(states.items())]


def charts(study: Study, state: State) -> list[Drawing]:
    """The charts for which there is data."""
    settings = study.settings
    if not any(end.value is not None for end in state.ended.values()):
        return []
    if settings.further:
        return _charts_of_several(study, state)
    rung, results = common_rung(study, state)
    at = f"at step {results[0].step:,}" if results else ""
    drawn = [Drawing("History", f"{settings.metric} of each trial", _history(study, state))]
    if settings.rungs:
        drawn.append(Drawing("Rungs", f"{settings.metric} by step", _curves(study, state)))
    if len(results) > 1:
        note = f"{settings.metric} {at}, {len(results)} trials; darker is better"
        axes = [*_parameter_axes(study, state, results), _result_axis(settings.metric, results)]
        drawn.append(Drawing("Parameters", note, _parallel(axes, results, _by_place(results))))
    found = importance.of(study, state, rung)
    if found:
        note = f"for {settings.metric} {at}, PED-ANOVA over {len(results)} trials"
        drawn.append(Drawing("Importance", note, _bars(found)))
    return drawn


def _charts_of_several(study: Study, state: State) -> list[Drawing]:
    """The front for each pair of objectives, then charts of each single objective."""
    settings, views = study.settings, pareto.views(study, state)
    done = [end for end in state.ended.values() if end.value is not None]
    valued = [[e for e in alone.ended.values() if e.value is not None] for _, alone in views]
    pairs = zip(settings.objectives, valued, strict=True)
    sides = [Across(number, each, _scale(ends)) for number, (each, ends) in enumerate(pairs)]
    drawn = []
    for y, x in combinations(sides, 2):
        note = f"{y.objective.metric} (upwards) against {x.objective.metric}, {len(done)} trials"
        drawn.append(Drawing("Pareto front", note, pareto_chart.drawn(settings, done, x, y)))
    if len(done) > 1:
        drawn.append(_parameters_of_several(study, state, done, valued))
    for alone, seen in views:
        name = alone.settings.metric
        drawn.append(Drawing("History", f"{name} of each trial", _history(alone, seen)))
        if found := importance.of(alone, seen, settings.num_rungs - 1):
            note = f"for {name}, PED-ANOVA over {len(done)} trials"
            drawn.append(Drawing("Importance", note, _bars(found)))
    return drawn


def _parameters_of_several(
    study: Study, state: State, done: Sequence[Ended], valued: Sequence[Sequence[Ended]]
) -> Drawing:
    settings = study.settings
    front = pareto.front(settings, done)
    others = [end for end in done if end not in front]
    names = [each.metric for each in settings.objectives]
    axes = [*_parameter_axes(study, state, done), *map(_result_axis, names, valued)]
    shades = {end.trial: _FAINTEST for end in others}
    shades |= {end.trial: NUM_SHADES - 1 for end in front}
    note = f"{len(done)} trials; dark: on the Pareto front"
    return Drawing("Parameters", note, _parallel(axes, [*front, *others], shades))


def common_rung(study: Study, state: State) -> tuple[int, list[Ended]]:
    """The rung at which most trials have a value, and their results there, the best first."""
    by_rung: dict[int, list[Ended]] = {}
    for (_, rung), end in state.ended.items():
        by_rung.setdefault(rung, []).append(end)
    valued = {rung: best_first(study.settings, ends) for rung, ends in by_rung.items()}
    rung = max(valued, key=lambda each: (len(valued[each]), each), default=0)
    return rung, valued.get(rung, [])


def _scale(ends: Sequence[Ended]) -> Scale:
    """Logarithmic earlier than for the curve of one run: a few bad trials would hide the others."""
    values = np.array([end.value for end in ends], dtype=float)
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > _WIDE:
        air = (high / low) ** 0.05
        return Scale(low / air, high * air, is_log=True)
    return value_scale(values)


# History: the last value of each trial, and the best so far of those that trained furthest.


def _history(study: Study, state: State) -> Markup:
    settings = study.settings
    last = [each for trial in range(len(state.asked)) if (each := state.last(trial)) is not None]
    valued = [end for end in last if end.value is not None]
    y = _scale(valued)
    x = Scale(-0.5, max(1.0, settings.num_trials - 0.5))
    furthest = max(end.rung for end in valued)
    drawing = [
        _dots([end for end in valued if end.rung < furthest], x, y, "line-1 faint"),
        _best_so_far(study, [end for end in valued if end.rung == furthest], x, y),
        _dots([end for end in valued if end.rung == furthest], x, y, "line-1"),
    ]
    frame = ChartFrame(
        "history of the study",
        [Tick(x.place(at), f"{at:,.0f}") for at in step_ticks(x, 6) if at >= 0],
        [Tick(y.place(at), number_text(at)) for at in ticks(y, 4)],
        height_px=240,
    )
    words = [("line-1", "trained furthest"), ("line-2", "best of them so far")]
    if any(end.rung < furthest for end in valued):
        words.insert(1, ("line-1 pale", "ended earlier"))
    return legend(words) + framed(Markup("").join(drawing), frame)


def _dots(ends: Sequence[Ended], x: Scale, y: Scale, css: str) -> Markup:
    return Markup("").join(
        Markup('<path class="dot {}" d="M{} {}h0"><title>{}</title></path>').format(
            css,
            across(x.place(end.trial)),
            up(y.place(end.value or 0.0)),
            f"trial {end.trial}: {end.value:.6g} after step {end.step}",
        )
        for end in ends
    )


def _best_so_far(study: Study, ends: Sequence[Ended], x: Scale, y: Scale) -> Markup:
    best: float | None = None
    sign = 1.0 if study.settings.mode == "min" else -1.0
    pieces: list[str] = []
    for end in sorted(ends, key=lambda each: each.trial):
        if best is None or sign * (end.value or 0.0) < sign * best:
            best = end.value or 0.0
            place, height = across(x.place(end.trial)), up(y.place(best))
            pieces.append(f"H{place}V{height}" if pieces else f"M{place} {height}")
    if not pieces:
        return Markup("")
    pieces.append(f"H{SIZE}")
    return Markup('<path class="line line-2" d="{}"/>').format("".join(pieces))


def _curves(study: Study, state: State) -> Markup:
    """Each trial's value at its rungs; the winner's curve is on top."""
    by_trial: dict[int, list[Ended]] = {}
    for (trial, _), end in sorted(state.ended.items()):
        if end.value is not None:
            by_trial.setdefault(trial, []).append(end)
    every = [end for ends in by_trial.values() for end in ends]
    x = Scale(0.0, max(end.step for end in every) * 1.04 or 1.0)
    y = _scale(every)
    best = decide.winner(study.settings, state)
    last = None if best is None else best.trial
    drawing = [
        _line(ends, x, y, "line-2" if trial == last else "line-1 faint")
        for trial, ends in sorted(by_trial.items(), key=lambda item: item[0] == last)
    ]
    frame = ChartFrame(
        "values at the rungs",
        [Tick(x.place(at), f"{at:,.0f}") for at in step_ticks(x, 5)],
        [Tick(y.place(at), number_text(at)) for at in ticks(y, 4)],
        height_px=240,
    )
    words = [("line-1 pale", "each trial"), ("line-2", "the best")]
    return legend(words) + framed(Markup("").join(drawing), frame)


def _line(ends: Sequence[Ended], x: Scale, y: Scale, css: str) -> Markup:
    points = [f"{across(x.place(end.step))} {up(y.place(end.value or 0.0))}" for end in ends]
    line = Markup('<path class="line {}" d="M{}"/>').format(css, "L".join(points))
    return line + _dots_at(points, css)


def _dots_at(points: Sequence[str], css: str) -> Markup:
    data = "".join(f"M{point}h0" for point in points)
    return Markup('<path class="dot {}" d="{}"/>').format(css, data)


# Parallel coordinates: an axis for each parameter and one for each result, a line for each trial.


@dataclass(frozen=True)
class _Axis:
    name: str
    places: Mapping[int, float]
    """Where each trial crosses the axis, from 0 to 1; trials without the parameter are missing."""
    marks: Sequence[tuple[float, str]]


def _parameter_axes(study: Study, state: State, results: Sequence[Ended]) -> list[_Axis]:
    values = {end.trial: state.asked[end.trial].values for end in results}
    return [_axis_of(key, each, values) for key, each in study.space.parameters.items()]


def _by_place(results: Sequence[Ended]) -> dict[int, int]:
    """Shade of each trial of a best-first list: better is darker."""
    worst = max(1, len(results) - 1)
    return {
        end.trial: NUM_SHADES - 1 - round((NUM_SHADES - 1 - _FAINTEST) * place / worst)
        for place, end in enumerate(results)
    }


def _parallel(axes: Sequence[_Axis], results: Sequence[Ended], shades: Mapping[int, int]) -> Markup:
    drawing, gap = [], 1.0 / max(1, len(axes) - 1)
    for number, _ in enumerate(axes):
        drawing.append(
            Markup('<path class="grid" d="M{} 0V{}"/>').format(across(number * gap), SIZE)
        )
    for end in reversed(results):  # the best is drawn last
        drawing.append(_crossing(axes, end, gap, shades[end.trial]))
    marks = Markup("").join(
        Markup('<span style="left:{}%;bottom:{}%">{}</span>').format(
            round(number * gap * 100, 1), round(at * 100, 1), word
        )
        for number, axis in enumerate(axes)
        for at, word in axis.marks
    )
    frame = ChartFrame(
        "parameters of the trials",
        [Tick(number * gap, axis.name) for number, axis in enumerate(axes)],
        [],
        height_px=300,
        has_grid=False,
    )
    chart = framed(Markup("").join(drawing), frame)
    return Markup('<div class="parallel">{}<div class="marks">{}</div></div>').format(chart, marks)


def _axis_of(key: str, parameter: Parameter, values: Mapping[int, Mapping[str, Scalar]]) -> _Axis:
    found = {trial: each[key] for trial, each in values.items() if key in each}
    if isinstance(parameter, Choice):
        rows = max(1, len(parameter.values) - 1)
        at = {value: index / rows for index, value in enumerate(parameter.values)}
        places = {trial: at[value] for trial, value in found.items()}
        return _Axis(short_key(key), places, [(place, str(value)) for value, place in at.items()])
    scale = Scale(float(parameter.low), float(parameter.high), is_log=parameter.log)
    numbers = {trial: value for trial, value in found.items() if isinstance(value, int | float)}
    marks = [(0.0, number_text(scale.low)), (1.0, number_text(scale.high))]
    return _Axis(short_key(key), {t: scale.place(float(v)) for t, v in numbers.items()}, marks)


def _result_axis(name: str, results: Sequence[Ended]) -> _Axis:
    values = np.array([end.value for end in results])
    low, high = float(values.min()), float(values.max())
    scale = Scale(low, high, is_log=low > 0 and high / low > _WIDE)
    places = {end.trial: scale.place(end.value or 0.0) for end in results}
    marks = [(0.0, number_text(low)), (1.0, number_text(high))]
    return _Axis(name, places, marks)


def _crossing(axes: Sequence[_Axis], end: Ended, gap: float, shade: int) -> Markup:
    pieces, is_drawing = [], False
    for number, axis in enumerate(axes):
        place = axis.places.get(end.trial)
        if place is None:  # the trial has no such parameter: the line leaves the axis out
            continue
        pieces.append(f"{'L' if is_drawing else 'M'}{across(number * gap)} {up(place)}")
        is_drawing = True
    return Markup(
        '<path class="line" style="stroke:var(--shade-{})" d="{}"><title>{}</title></path>'
    ).format(shade, "".join(pieces), f"trial {end.trial}: {end.value:.6g}")


def _bars(found: Mapping[str, float]) -> Markup:
    """One bar per parameter, the most important on top."""
    rows = Markup("").join(
        Markup(
            '<div class="bar"><span class="mono">{}</span><svg viewBox="0 0 1000 1000" '
            'preserveAspectRatio="none" aria-hidden="true">{}</svg><span class="number">{}</span>'
            "</div>"
        ).format(short_key(key), box(0, 0.2, share, 0.6, "is-productive"), f"{share:.0%}")
        for key, share in sorted(found.items(), key=lambda item: -item[1])
    )
    return Markup('<div class="bars">{}</div>').format(rows)
