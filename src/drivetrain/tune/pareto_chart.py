"""Two objectives of a study against each other, with the Pareto front as a step line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from drivetrain.tune import pareto
from drivetrain.tune.journal import Ended
from drivetrain.tune.settings import Objective, Settings
from drivetrain.view.charts import ChartFrame, Tick, across, framed, legend, up
from drivetrain.view.series import Scale, number_text, ticks


@dataclass(frozen=True)
class Across:
    """One of the two axes."""

    index: int
    """Index among the study's objectives."""
    objective: Objective
    scale: Scale

    def of(self, settings: Settings, end: Ended) -> float:
        return pareto.values_of(settings, end)[self.index]


def drawn(settings: Settings, ends: Sequence[Ended], x: Across, y: Across) -> Markup:
    """Draw each trial as a dot, those of the front on top."""
    front = pareto.front(settings, ends)
    on_front = {end.trial for end in front}
    others = [end for end in ends if end.trial not in on_front]
    drawing = [_dots(settings, others, x, y, "line-1 faint")]
    if len(settings.objectives) == 2:  # the front of three is no line in a plane
        drawing.append(_steps(settings, front, x, y))
    drawing.append(_dots(settings, front, x, y, "line-2"))
    frame = ChartFrame(
        f"{y.objective.metric} against {x.objective.metric}",
        [Tick(x.scale.place(at), number_text(at)) for at in ticks(x.scale, 4)],
        [Tick(y.scale.place(at), number_text(at)) for at in ticks(y.scale, 4)],
        height_px=300,
    )
    words = [("line-2", "on the Pareto front")]
    words += [("line-1 pale", "dominated by one of them")] if others else []
    return legend(words) + framed(Markup("").join(drawing), frame)


def _dots(settings: Settings, ends: Sequence[Ended], x: Across, y: Across, css: str) -> Markup:
    names = [each.metric for each in settings.objectives]
    return Markup("").join(
        Markup('<path class="dot {}" d="M{} {}h0"><title>{}</title></path>').format(
            css,
            across(x.scale.place(x.of(settings, end))),
            up(y.scale.place(y.of(settings, end))),
            f"trial {end.trial}: "
            + ", ".join(
                f"{name} {value:.6g}"
                for name, value in zip(names, pareto.values_of(settings, end), strict=True)
            ),
        )
        for end in ends
    )


def _steps(settings: Settings, front: Sequence[Ended], x: Across, y: Across) -> Markup:
    """The front as a step line; a trial of the front dominates everything beyond it."""
    points = sorted((x.of(settings, end), y.of(settings, end)) for end in front)
    if x.objective.mode == "max":
        points.reverse()
    pieces = []
    for index, (along, height) in enumerate(points):
        place = across(x.scale.place(along))
        level = up(y.scale.place(height))
        pieces.append(f"H{place}V{level}" if index else f"M{place} {level}")
    return Markup('<path class="line line-2" d="{}"/>').format("".join(pieces))
