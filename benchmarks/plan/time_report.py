"""What came of `bench plan-time`: errors, the order of plans, and what the chosen one costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from benchmarks.plan.time import PLACES


@dataclass(frozen=True)
class Timed:
    """One plan, both ways."""

    place: str
    model: str
    title: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative; negative: faster than it is."""
        return self.predicted / self.measured - 1.0


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau: pairs in the same order less pairs in the other, of all."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def read(folder: Path) -> list[Timed]:
    """Every place that was measured."""
    rows = []
    for place in PLACES:
        path = folder / place.folder
        if not (path / "measured.json").exists():
            continue
        plans = json.loads((path / "predicted.json").read_text())["plans"]
        steps = json.loads((path / "measured.json").read_text())["steps_s"]
        for plan, seconds in zip(plans, steps, strict=True):
            title = (
                f"{plan['title']}, micro-batch {plan['micro_batch_size']} × {plan['accumulation']}"
                f", recompute {plan['settings']['memory.activation_checkpointing']}"
            )
            total = plan["step_s"]["total"]
            rows.append(Timed(place.name, plan["model"], title, total, median(seconds)))
    return rows


def report(folder: Path) -> str:
    """summary.md and table.md; the summary."""
    rows = read(folder)
    lines = [
        "| place | model | plans | median error | largest | Kendall τ | the chosen plan takes "
        "longer than the best by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for place, model in dict.fromkeys((row.place, row.model) for row in rows):
        own = [row for row in rows if (row.place, row.model) == (place, model)]
        lines.append(f"| {place} | {model} | {len(own)} | {' | '.join(_figures(own))} |")
    errors = [abs(row.error) for row in rows]
    lines += ["", f"{len(rows)} plans: median error {median(errors):.1%}"]
    text = "\n".join(lines) + "\n"
    (folder / "summary.md").write_text(text)
    (folder / "table.md").write_text(_table(rows))
    return text


def _figures(own: list[Timed]) -> list[str]:
    errors = [row.error for row in own]
    chosen = min(own, key=lambda row: row.predicted)
    best = min(own, key=lambda row: row.measured)
    return [
        f"{median(map(abs, errors)):.1%}",
        f"{max(errors, key=abs):+.1%}",
        f"{kendall([(row.predicted, row.measured) for row in own]):.2f}",
        f"{chosen.measured / best.measured - 1.0:.1%}",
    ]


def _table(rows: list[Timed]) -> str:
    lines = [
        "| place | model | plan | predicted ms | measured ms | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.place} | {row.model} | {row.title} | {row.predicted * 1e3:.0f} "
        f"| {row.measured * 1e3:.0f} | {row.error:+.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
