"""Memory as predicted, next to memory as measured.

python -m benchmarks.plan.memory predict FOLDER    predictions.json, nothing is run
python -m benchmarks.plan.memory measure FOLDER    trains every case on real ranks
python -m benchmarks.plan.memory report  FOLDER    table.md and scatter.png
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan.cases import Case, cases

NUM_ROUNDS = 3
"""gloo's thread lets go of a tensor some time after its collective is over, at some other step each
time: the least of a few rounds is what the step itself needs."""


def predict(folder: Path) -> None:
    """Every case, on fake tensors."""
    from benchmarks.plan.models import subject_of
    from drivetrain.plan.cost.estimate import worst_memory
    from drivetrain.plan.profile.profiling import Profiler

    profilers: dict[tuple[str, str], Profiler] = {}
    found = {}
    for case in cases():
        key = (case.model, case.optimizer)
        if key not in profilers:
            profilers[key] = Profiler(subject_of(*key))
        profile = profilers[key].profile(case.candidate.way)
        memory = worst_memory(profile, case.candidate)
        found[case.name] = {**memory.components(), "total": memory.total, "moment": memory.moment}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "predictions.json").write_text(json.dumps(found, indent=1) + "\n")


def measure(folder: Path) -> None:
    """On as many ranks as each case has; what exchanges with others, several times."""
    from drivetrain.launch.local import launch

    for number in range(1, NUM_ROUNDS + 1):
        for ranks in (1, 2, 4) if number == 1 else (2, 4):
            words = ["--nproc-per-node", str(ranks), "--spares", "0", "--max-restarts", "0", "-m"]
            worker = "benchmarks.plan.memory_worker"
            launch([*words, worker, str(folder / f"round-{number}")])


@dataclass(frozen=True)
class Compared:
    """One case, both ways."""

    case: Case
    predicted: float
    measured: float
    """Of the rank that had most; of each rank, the least of all rounds."""
    highest: float
    """Of any rank in any round."""

    @property
    def error(self) -> float:
        """Relative; negative: too low."""
        return self.predicted / self.measured - 1.0


def compare(folder: Path) -> list[Compared]:
    """Every case that has both."""
    predictions = json.loads((folder / "predictions.json").read_text())
    peaks = _peaks(folder)
    return [
        Compared(
            case,
            predictions[case.name]["total"],
            max(min(rounds) for rounds in peaks[case.name]),
            max(max(rounds) for rounds in peaks[case.name]),
        )
        for case in cases()
        if case.name in peaks and case.name in predictions
    ]


def _peaks(folder: Path) -> dict[str, list[list[float]]]:
    """By case: of each rank, one per round."""
    by_rank: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("round-*/measured-*.json")):
        for name, peak in json.loads(path.read_text()).items():
            by_rank.setdefault(name, {}).setdefault(path.name, []).append(peak)
    return {name: list(ranks.values()) for name, ranks in by_rank.items()}


def summary(rows: list[Compared]) -> dict[str, float]:
    """Median, 95th percentile and the lowest."""
    errors = sorted(abs(row.error) for row in rows)
    return {
        "cases": len(rows),
        "median": statistics.median(errors),
        "p95": errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        "largest": errors[-1],
        "lowest": min(row.error for row in rows),
    }


def _sentence(what: str, found: dict[str, float]) -> str:
    return (
        f"{found['cases']:.0f} {what}: median error {found['median']:.2%}, 95th percentile "
        f"{found['p95']:.2%}, largest {found['largest']:.2%}, furthest below {found['lowest']:.2%}"
    )


def report(folder: Path) -> str:
    """A table and a picture."""
    rows = compare(folder)
    found = summary(rows)
    held_out = [row for row in rows if row.case.is_held_out]
    blind = summary(held_out) if held_out else {}
    lines = [
        _sentence("configurations", found),
        *([_sentence("of them blind", blind)] if blind else []),
    ]
    lines += [
        "",
        "| configuration | predicted MiB | measured MiB | error | highest MiB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.case.name} | {row.predicted / 2**20:.1f} | {row.measured / 2**20:.1f} "
        f"| {row.error:+.2%} | {row.highest / 2**20:.1f} |"
        for row in rows
    ]
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text)
    (folder / "summary.json").write_text(json.dumps({**found, "blind": blind}, indent=1) + "\n")
    _scatter(rows, folder / "scatter.png")
    return text


def _scatter(rows: list[Compared], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6))
    for spread in dict.fromkeys(row.case.spread for row in rows):
        own = [row for row in rows if row.case.spread == spread]
        axes.scatter(
            [row.measured / 2**20 for row in own],
            [row.predicted / 2**20 for row in own],
            label=spread,
            s=22,
        )
    most = max(max(row.measured, row.predicted) for row in rows) / 2**20
    axes.plot([0, most], [0, most], color="black", linewidth=0.8)
    axes.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], color="black", alpha=0.08)
    axes.set_xlabel("measured peak, MiB")
    axes.set_ylabel("predicted peak, MiB (grey: ±5%)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """One of the three."""
    task, folder = sys.argv[1], Path(sys.argv[2])
    if task == "predict":
        predict(folder)
    elif task == "measure":
        measure(folder)
    else:
        print(report(folder))


if __name__ == "__main__":
    main()
