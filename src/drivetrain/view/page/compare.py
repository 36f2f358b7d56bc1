"""Two runs as one page: curves over each other, tables side by side."""

from __future__ import annotations

import time

from drivetrain._version import __version__
from drivetrain.view.charts.curve import Line
from drivetrain.view.charts.ledger import ledger_bar
from drivetrain.view.compare import Comparison
from drivetrain.view.page.report import Drawing, curve_of
from drivetrain.view.page.template import render, style_sheet
from drivetrain.view.series import is_drawn, order_of, title_of


def compare_page(comparison: Comparison, made_s: float) -> str:
    """The whole page."""
    sides = (comparison.here, comparison.there)
    return render(
        "compare.html.j2",
        {
            "comparison": comparison,
            "names": comparison.names,
            "style": style_sheet(),
            "curves": _curves(comparison),
            "bars": ["" if run.ledger is None else ledger_bar(run.ledger) for run in sides],
            "version": __version__,
            "made": time.strftime("%Y-%m-%d %H:%M", time.localtime(made_s)),
        },
    )


def _curves(comparison: Comparison) -> list[Drawing]:
    sides = ((comparison.here, "line-1"), (comparison.there, "line-2"))
    drawn = []
    names = {*comparison.here.scalars, *comparison.there.scalars}
    for name in sorted(filter(is_drawn, names), key=order_of):
        lines = [Line(run.scalar(name), css) for run, css in sides]
        shown = [line for line in lines if not line.series.is_empty]
        note = "" if len(shown) == 2 else f"only in {_only(comparison, name)}"
        drawn.append(Drawing(title_of(name), note, curve_of(shown)))
    return drawn


def _only(comparison: Comparison, name: str) -> str:
    return comparison.names[comparison.here.scalar(name).is_empty]
