"""The report: Markdown that can be pasted into an issue. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.gpu_smoke.rows import FAIL, NOT_RUN, PASS, SKIPPED, Result, Row


def exit_code(results: Sequence[Result]) -> int:
    """1 when something failed; what was skipped or did not fit is no failure."""
    return 1 if any(result.state == FAIL for result in results) else 0


def report(heading: Mapping[str, str], results: Sequence[Result]) -> str:
    """A line on where it ran, a table of all checks, and each with its figures."""
    lines = [
        f"# GPU smoke test: {_verdict(results)}",
        "",
        ", ".join(f"{name} {value}".strip() for name, value in heading.items()) + ".",
        "",
        "| check | result | parts | seconds |",
        "| --- | --- | --- | ---: |",
    ]
    for each in results:
        lines.append(_line(each.title, each.state, _counts(each.rows), f"{each.seconds:.0f}"))
    for each in results:
        lines += ["", f"## {each.title}", "", "| part | result | figures |", "| --- | --- | --- |"]
        lines += [_line(row.name, row.state, row.figure) for row in each.rows]
        for row in each.rows:
            if row.text:
                lines += ["", row.text.strip()]
    return "\n".join(lines) + "\n"


def _verdict(results: Sequence[Result]) -> str:
    counts = Counter(result.state for result in results)
    others = [f"{counts[s]} {s}" for s in (FAIL, NOT_RUN, SKIPPED) if counts[s]]
    passed = f"{counts[PASS]} of {len(results)} checks passed"
    return ", ".join([passed, *others])


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.state for row in rows)
    return ", ".join(f"{counts[s]} {s}" for s in (PASS, FAIL, SKIPPED, NOT_RUN) if counts[s])


def _line(*cells: str) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
