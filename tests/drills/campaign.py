"""A campaign: many seeded random drills over strategies, ranks and hosts; a table and a plot.

Drill n is the same drill whenever it is run: its setting and its faults follow from n alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.testing.hosts import Hosts, hosts_available, make_hosts
from drivetrain.verify.drills.drill import (
    DrillOutcome,
    Reference,
    Setting,
    run_drill,
    run_reference,
    small_disk,
)
from drivetrain.verify.drills.faults import ONE_HOST_ALL, TWO_HOSTS, Faults, Kind, draw
from drivetrain.verify.drills.template import Template

_SCRIPT = ("-m", "drivetrain.verify.drills.workload")
_STEPS = (6, 22)


@dataclass(frozen=True)
class Case:
    """One way to run the workload."""

    name: str
    ranks: int
    """Per host."""
    hosts: int
    words: tuple[str, ...]
    elastic: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What can go wrong in it."""
        return ONE_HOST_ALL if self.hosts == 1 else TWO_HOSTS


_FSDP, _BITWISE = ("parallel.strategy=fsdp",), ("reproducibility=bitwise",)
CASES = (
    Case("ddp, 2 ranks", 2, 1, ()),
    Case("fsdp, 2 ranks", 2, 1, _FSDP),
    Case("ddp, 2 hosts × 1 rank, elastic", 1, 2, _BITWISE, elastic=True),
    Case("ddp, 3 ranks", 3, 1, ()),
    Case("fsdp, 2 hosts × 1 rank", 1, 2, _FSDP),
    Case("ddp, 2 ranks", 2, 1, ()),
    Case("fsdp, 4 ranks", 4, 1, _FSDP),
    Case("ddp, 2 hosts × 2 ranks, elastic", 2, 2, _BITWISE, elastic=True),
)


@dataclass(frozen=True)
class Row:
    """One drill, as it is written down."""

    number: int
    case: str
    kind: str
    faults: list[str]
    passed: bool
    problems: list[str]
    recovery_s: list[float]
    took_s: float
    attempts: int
    device: str = ""


def run_campaign(
    numbers: range, output: Path, say: Callable[[str], None], *, keep_failed: bool = True
) -> list[Row]:
    """Drills `numbers`, each line of the result written as soon as it is known."""
    output.mkdir(parents=True, exist_ok=True)
    results = output / "drills.jsonl"
    references: dict[Case, Reference] = {}
    rows = []
    with (
        _two_hosts() as hosts,
        tempfile.TemporaryDirectory(prefix="drills-") as scratch,
        small_disk(Path(scratch) / "disk") as disk,  # before the templates: they keep their mounts
        _templates(Path(scratch), hosts) as templates,
    ):
        for number in numbers:
            case = _case(number, has_hosts=hosts is not None)
            here = hosts if case.hosts == 2 else None
            setting = Setting(
                (*_SCRIPT, *case.words),
                case.ranks,
                case.elastic,
                disk=disk,
                templates=templates[case.hosts],
            )
            if case not in references:
                folder = Path(scratch) / f"reference-{len(references)}"
                references[case] = run_reference(setting, folder, here)
            folder = Path(scratch) / f"drill-{number}"
            outcome = run_drill(setting, faults_of(number, case), references[case], folder, here)
            row = _row(number, case, outcome)
            rows.append(row)
            with open(results, "a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            say(_line(row))
            if keep_failed and not row.passed:
                shutil.copytree(folder, output / f"failed-{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def faults_of(number: int, case: Case) -> Faults:
    """All kinds in turn, over all cases in turn."""
    seed = number // len(CASES) * 31 + number
    return draw(seed, case.kinds, _STEPS, case.ranks * case.hosts, case.hosts)


def read_rows(output: Path) -> list[Row]:
    """What a campaign has written so far."""
    return [Row(**json.loads(line)) for line in (output / "drills.jsonl").read_text().splitlines()]


def table(rows: list[Row]) -> str:
    """Per kind of fault: how many passed, and how long the recovery took."""
    lines = [
        "| fault | drills | passed | recovery p50 (s) | p95 | max |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in [*sorted({row.kind for row in rows}), "all"]:
        chosen = [row for row in rows if kind in (row.kind, "all")]
        times = sorted(t for row in chosen for t in row.recovery_s)
        figures = (
            f"{median(times):.2f} | {_percentile(times, 0.95):.2f} | {times[-1]:.2f}"
            if times
            else "– | – | –"
        )
        passed = sum(row.passed for row in chosen)
        lines.append(f"| {kind} | {len(chosen)} | {passed} | {figures} |")
    devices = sorted({row.device for row in rows} - {""})
    lines += ["", f"On: {', '.join(devices)}."] if devices else []
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Every recovery as a dot, by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = sorted({row.kind for row in rows})
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(kinds) + 1.6))
    for position, kind in enumerate(kinds):
        times = [t for row in rows if row.kind == kind for t in row.recovery_s]
        heights = [position + 0.28 * ((i * 0.618) % 1 - 0.5) for i in range(len(times))]
        axes.plot(times, heights, "o", markersize=3.5, alpha=0.55, color="#2a6f97")
        if times:
            axes.plot([median(times)] * 2, [position - 0.3, position + 0.3], color="#d1495b", lw=2)
    axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
    axes.set_xscale("log")
    axes.set_xlabel("seconds from the fault to the next committed checkpoint (red: median)")
    passed = sum(row.passed for row in rows)
    axes.set_title(f"{passed} of {len(rows)} drills ended as if nothing had happened", loc="left")
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _case(number: int, *, has_hosts: bool) -> Case:
    case = CASES[number % len(CASES)]
    return case if has_hosts or case.hosts == 1 else CASES[number % 2]


@contextmanager
def _templates(folder: Path, hosts: Hosts | None) -> Iterator[dict[int, tuple[Template, ...]]]:
    """By number of hosts."""
    here, there = (Template(folder),), tuple(Template(folder, host) for host in hosts or ())
    try:
        yield {1: here, 2: there}
    finally:
        for template in (*here, *there):
            template.close()


@contextmanager
def _two_hosts() -> Iterator[Hosts | None]:
    if hosts_available() is not None:
        yield None
        return
    with make_hosts(2) as hosts:
        yield hosts


def _row(number: int, case: Case, outcome: DrillOutcome) -> Row:
    return Row(
        number=number,
        case=case.name,
        kind=outcome.faults[0].kind,
        faults=[str(fault) for fault in outcome.faults],
        passed=outcome.passed,
        problems=outcome.problems,
        recovery_s=[round(value, 3) for value in outcome.recovery_s],
        took_s=round(outcome.took_s, 2),
        attempts=outcome.attempts,
        device=outcome.device,
    )


def _line(row: Row) -> str:
    mark: Any = "passed" if row.passed else "FAILED"
    recovery = ", ".join(f"{value:.2f} s" for value in row.recovery_s) or "–"
    text = f"{row.number:4d}  {mark}  {row.case:32}  {'; '.join(row.faults)}  recovery {recovery}"
    return text if row.passed else f"{text}\n      {row.problems}"


def main() -> None:
    """1 when a drill failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.campaign", description=__doc__)
    parser.add_argument("count", type=int, help="how many drills")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--output", type=Path, default=Path("build/drills"))
    given = parser.parse_args()
    run_campaign(
        range(given.first, given.first + given.count),
        given.output,
        lambda text: print(text, flush=True),
    )
    rows = read_rows(given.output)
    (given.output / "table.md").write_text(table(rows))
    plot(rows, given.output / "recovery.png")
    print(table(rows))
    sys.exit(0 if all(row.passed for row in rows) else 1)


if __name__ == "__main__":
    main()
