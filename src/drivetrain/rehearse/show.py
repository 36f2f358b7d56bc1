"""A rehearsal's result, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from drivetrain.core.text import readable_bytes
from drivetrain.parallel.layout import Layout
from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.client import Rehearsal
from drivetrain.rehearse.findings import RankReport, RehearsalFinding
from drivetrain.rehearse.world import axes_of


def lines(rehearsal: Rehearsal) -> list[str]:
    shown = [_head(rehearsal), *(f"  {note}" for note in _notes(rehearsal))]
    complete = [report for report in rehearsal.reports if report.failure is None]
    if complete and rehearsal.layout is not None:
        shown += ["", *_memory_table(complete), "", *_call_table(complete, rehearsal.layout)]
    shown += _plan_table(rehearsal)
    values = {line for report in rehearsal.reports for line in report.values_read}
    for line in sorted(values, key=str):
        shown.append(f"  a value was read from a fake tensor, which returned 1: {line}")
    shown.append("")
    shown += [str(finding) for finding in rehearsal.findings]
    if all(finding.is_warning for finding in rehearsal.findings):
        else_ = "else " if rehearsal.findings else ""
        shown.append(f"nothing {else_}found: this is how it would train")
    return shown


def as_dict(rehearsal: Rehearsal) -> dict[str, Any]:
    layout = rehearsal.layout
    return {
        "script": list(rehearsal.asked.argv),
        "world_size": rehearsal.asked.world_size,
        "layout": None if layout is None else str(layout),
        "seconds": round(rehearsal.seconds, 2),
        "process_bytes": rehearsal.process_bytes,
        "device_memory_bytes": rehearsal.asked.device_memory_bytes,
        "ranks": [_rank_dict(report, layout) for report in rehearsal.reports],
        "beside_plan": [{**asdict(one), "error": one.error} for one in rehearsal.beside_plan],
        "plan_problem": rehearsal.plan_problem,
        "findings": [_finding_dict(finding) for finding in rehearsal.findings],
    }


def _head(rehearsal: Rehearsal) -> str:
    asked, layout = rehearsal.asked, rehearsal.layout
    where = "" if layout is None else f", {layout}"
    return (
        f"{asked.argv[0]}: {asked.world_size:,} ranks{where}; rehearsed {len(rehearsal.reports)} "
        f"of them in {rehearsal.seconds:.1f} s and {readable_bytes(rehearsal.process_bytes)}"
    )


def _notes(rehearsal: Rehearsal) -> Sequence[str]:
    return rehearsal.reports[0].notes if rehearsal.reports else ()


def _memory_table(reports: Iterable[RankReport]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("rank", "kind", "weights", "gradients", "optimizer", "activations", "peak")
    ]
    for report in reports:
        memory = report.memory
        sizes = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
        cells = (*sizes, memory.peak)
        rows.append((str(report.rank), report.kind, *map(readable_bytes, cells)))
    return _aligned(rows, left={1})


def _call_table(reports: Sequence[RankReport], layout: Layout) -> list[str]:
    """Return the table of one step's collectives; ranks with equal figures share a row."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for report in reports:
        for row in _totals(report.in_step, layout):
            kinds.setdefault(row, []).append(report.rank)
    rows = [("collective", "along", "ranks", "times", "bytes each step", "on")]
    order = sorted(kinds.items(), key=lambda item: (item[1][0], item[0]))
    for (name, along, size, count, num_bytes), ranks in order:
        on = "every rank" if len(ranks) == len(reports) else _some(ranks)
        rows.append((name, along, str(size), str(count), readable_bytes(num_bytes), on))
    return _aligned(rows, left={0, 1, 5})


def _plan_table(rehearsal: Rehearsal) -> list[str]:
    """Return the table of the planner's predictions and the counted figures."""
    if rehearsal.plan_problem:
        return ["", f"  no prediction from the planner: {rehearsal.plan_problem}"]
    if not rehearsal.beside_plan:
        return []
    rows: list[tuple[str, ...]] = [("rank", "per step", "planner predicts", "counted", "error")]
    for one in rehearsal.beside_plan:
        error = "" if one.error is None else f"{one.error:+.1%}"
        sizes = (readable_bytes(round(one.predicted)), readable_bytes(round(one.counted)))
        rows.append((str(one.rank), one.what, *sizes, error))
    return ["", *_aligned(rows, left={1})]


def _totals(calls: Iterable[RehearsedCall], layout: Layout) -> list[tuple[str, str, int, int, int]]:
    summed: dict[tuple[str, str, int], tuple[int, int]] = {}
    for call in calls:
        key = (call.name, axes_of(call.ranks, layout), len(call.ranks))
        count, size = summed.get(key, (0, 0))
        summed[key] = (count + 1, size + call.num_bytes)
    return [(*key, *value) for key, value in summed.items()]


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown} …" if len(ranks) > 4 else shown


def _aligned(rows: Sequence[Sequence[str]], left: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rank_dict(report: RankReport, layout: Layout | None) -> dict[str, Any]:
    memory = report.memory
    return {
        "rank": report.rank,
        "kind": report.kind,
        "weights_bytes": memory.weights,
        "gradients_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activations_bytes": memory.activations,
        "peak_bytes": memory.peak,
        "collectives": []
        if layout is None
        else [
            dict(zip(("name", "along", "num_ranks", "times", "bytes"), row, strict=True))
            for row in _totals(report.in_step, layout)
        ],
        "seconds": round(report.seconds, 2),
        "process_bytes": report.process_bytes,
    }


def _finding_dict(finding: RehearsalFinding) -> dict[str, Any]:
    line = finding.line
    return {
        "what": finding.what,
        "is_warning": finding.is_warning,
        "ranks": list(finding.ranks),
        "message": finding.message,
        "file": None if line is None else line.file,
        "line": None if line is None else line.number,
        "source": None if line is None else line.text,
    }
