"""Two runs side by side: their configuration differences and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain.record.ledger import BETWEEN_RUNS
from drivetrain.view.palette import words
from drivetrain.view.run_view import RunView
from drivetrain.view.series import ChartSeries, duration_text, number_text, order_of, title_of
from drivetrain.view.summary import typical


@dataclass(frozen=True)
class Row:
    """One value of both runs; empty where a run lacks it."""

    name: str
    here: str
    there: str
    change: str = ""
    """How `there` compares with `here`, if both are numbers."""


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs, for display."""

    here: RunView
    there: RunView
    config: Sequence[Row]
    """Only keys that differ."""
    facts: Sequence[Row]
    """Only facts that differ."""
    outcome: Sequence[Row]
    metrics: Sequence[Row]
    """The last value of every scalar that either run has."""
    ledger: Sequence[Row]

    @property
    def names(self) -> tuple[str, str]:
        """Distinct names, even if both directories have the same name."""
        if self.here.name != self.there.name:
            return self.here.name, self.there.name
        return f"{self.here.name} (first)", f"{self.there.name} (second)"


def compare_runs(here: RunView, there: RunView) -> RunComparison:
    """Compare two views. Pure."""
    return RunComparison(
        here,
        there,
        config=_differing(
            {key: value for key, (value, _) in here.config.items()},
            {key: value for key, (value, _) in there.config.items()},
        ),
        facts=_differing(here.facts, there.facts),
        outcome=_outcome(here, there),
        metrics=_metrics(here, there),
        ledger=_ledger(here, there),
    )


def change_text(here: float, there: float) -> str:
    """Return '+4.2%', 'the same', '×3.1' or '÷5,000'; empty if a ratio is meaningless."""
    if not (math.isfinite(here) and math.isfinite(there)):
        return ""
    if here == there:
        return "the same"
    if here <= 0 or there <= 0:
        return ""
    ratio = there / here
    if ratio >= 2 or ratio <= 0.5:
        return f"×{ratio:.3g}" if 0.001 <= ratio < 1000 else _large_ratio(ratio)
    change = ratio - 1
    if abs(change) >= 5e-4:
        return f"{change:+.1%}"
    return f"{100 * change:+.2g}%" if abs(change) >= 1e-6 else "below 0.0001%"


def _large_ratio(ratio: float) -> str:
    return f"×{ratio:,.0f}" if ratio > 1 else f"÷{1 / ratio:,.0f}"


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[Row]:
    keys = dict.fromkeys([*here, *there])
    return [
        Row(key, here.get(key, "–"), there.get(key, "–"))
        for key in keys
        if here.get(key) != there.get(key)
    ]


def _outcome(here: RunView, there: RunView) -> list[Row]:
    rows = [
        Row("state", here.state, there.state),
        Row("steps", f"{here.step:,}", f"{there.step:,}", change_text(here.step, there.step)),
        _timed("wall clock", here.wall_s, there.wall_s),
        Row("attempts", str(len(here.attempts)), str(len(there.attempts))),
        Row("ranks", _ranks(here), _ranks(there)),
    ]
    for name in ("throughput/tokens_per_sec", "throughput/samples_per_sec"):
        rates = typical(here, name), typical(there, name)
        if rates[0] is not None and rates[1] is not None:
            rows.append(_numbers(f"{title_of(name).lower()}, median", rates[0], rates[1]))
    return rows


def _metrics(here: RunView, there: RunView) -> list[Row]:
    names = sorted({*here.scalars, *there.scalars}, key=order_of)
    return [
        _last_values(here.scalar(name), there.scalar(name))
        for name in names
        if not name.startswith(("throughput/", "system/", "time/"))  # last values mean little
    ]


def _last_values(here: ChartSeries, there: ChartSeries) -> Row:
    shown = ["–" if side.is_empty else number_text(side.last) for side in (here, there)]
    return Row(here.name, shown[0], shown[1], change_text(here.last, there.last))


def _ledger(here: RunView, there: RunView) -> list[Row]:
    if here.ledger is None or there.ledger is None:
        return []
    shares = here.ledger.share("productive"), there.ledger.share("productive")
    rows = [Row("goodput", f"{shares[0]:.1%}", f"{shares[1]:.1%}")]
    for name in dict.fromkeys([*here.ledger.seconds, *there.ledger.seconds]):
        seconds = here.ledger.seconds.get(name, 0.0), there.ledger.seconds.get(name, 0.0)
        rows.append(_timed(words(name), *seconds))
    between_s = here.ledger.between_runs_s, there.ledger.between_runs_s
    return [*rows, _timed(BETWEEN_RUNS, *between_s)] if any(between_s) else rows


def _numbers(name: str, here: float, there: float) -> Row:
    return Row(name, number_text(here), number_text(there), change_text(here, there))


def _timed(name: str, here_s: float, there_s: float) -> Row:
    shown = [duration_text(each) for each in (here_s, there_s)]
    if any(text.endswith(" ms") for text in shown) and max(here_s, there_s) >= 1:
        # milliseconds beside seconds are easily misread
        shown = [
            f"{each:.2g} s" if text.endswith(" ms") else text
            for each, text in zip((here_s, there_s), shown, strict=True)
        ]
    return Row(name, shown[0], shown[1], change_text(here_s, there_s))


def _ranks(run: RunView) -> str:
    return f"{run.attempts[-1].num_ranks:,}" if run.attempts else "–"
