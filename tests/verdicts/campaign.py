"""Every fault with several seeds, and clean runs: python -m tests.verdicts.campaign FOLDER [SEEDS]

Appends to FOLDER/verdicts.jsonl, a row per run, and writes FOLDER/table.md from all of it: a
campaign that was cut off goes on where it stood.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from drivetrain.diagnose import straggler
from drivetrain.record.reading import open_run
from tests.verdicts.faults import FAULTS, Plant, score
from tests.verdicts.running import Outcome, Stage, run_planted

NUM_CLEAN = 50


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    seed: int
    ranks: int
    rank: int
    step: int
    found: str | None
    """Kind of the first finding."""
    said: str
    kind_right: bool
    rank_right: bool
    line_right: bool
    late_s: float | None
    found_after_steps: int | None
    """For a slow rank: steps from when it became slow to when a window showed it."""
    took_s: float

    @property
    def is_right(self) -> bool:
        if self.name == "clean":
            return self.found is None
        return self.kind_right and self.rank_right and self.line_right


def row_of(outcome: Outcome, took_s: float) -> Row:
    plant, findings = outcome.plant, outcome.findings
    first = findings[0] if findings else None
    scored = score(plant, findings) if plant.name != "clean" else None
    return Row(
        plant.name,
        plant.seed,
        plant.ranks,
        plant.rank,
        plant.step,
        first.kind.value if first else None,
        first.what if first else "",
        bool(scored and scored.kind),
        bool(scored and scored.rank),
        bool(scored and scored.line),
        None if outcome.late_s is None else round(outcome.late_s, 2),
        _found_after(outcome) if plant.name.startswith("slow_rank") else None,
        round(took_s, 1),
    )


def _found_after(outcome: Outcome) -> int | None:
    """By the records alone, step by step, as somebody watching would have seen it."""
    own = open_run(outcome.run_dir).matrix("own_s").values.astype(np.float64)
    slow = straggler.slow_windows(own)
    ends = np.flatnonzero(slow[outcome.plant.rank]) + straggler.WINDOW  # steps done
    later = ends[ends > outcome.plant.step]
    return int(later[0]) - outcome.plant.step if len(later) else None


def table(rows: list[Row]) -> str:
    lines = [
        "| planted | runs | kind | rank | line | all right | late p50 (s) | max |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in [*FAULTS, "clean"]:
        chosen = [row for row in rows if row.name == name]
        if not chosen:
            continue
        late = [row.late_s for row in chosen if row.late_s is not None]
        figures = f"{median(late):.1f} | {max(late):.1f}" if late else "– | –"
        right = sum(row.is_right for row in chosen)
        if name == "clean":
            lines.append(f"| {name} | {len(chosen)} | – | – | – | {right} | – | – |")
            continue
        parts = " | ".join(
            str(sum(getattr(row, part) for row in chosen))
            for part in ("kind_right", "rank_right", "line_right")
        )
        lines.append(f"| {name} | {len(chosen)} | {parts} | {right} | {figures} |")
    faults = [row for row in rows if row.name != "clean"]
    right = sum(row.is_right for row in faults)
    lines.append(f"| all faults | {len(faults)} | | | | {right} | | |")
    return "\n".join(lines) + "\n" + _stragglers(rows)


def _stragglers(rows: list[Row]) -> str:
    lines = [
        "\n| slow by | runs | found | named | median steps to find |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in ("slow_rank_10", "slow_rank_20", "slow_rank_50"):
        chosen = [row for row in rows if row.name == name]
        after = [r.found_after_steps for r in chosen if r.found_after_steps is not None]
        if chosen:
            found = sum(row.kind_right for row in chosen)
            named = sum(row.is_right for row in chosen)
            steps = f"{median(after):.0f}" if after else "–"
            percent = name.rpartition("_")[2]
            lines.append(f"| {percent} % | {len(chosen)} | {found} | {named} | {steps} |")
    accused = [row for row in rows if row.found == "straggler"]
    true = [row for row in accused if row.name.startswith("slow_rank") and row.is_right]
    planted = [row for row in rows if row.name.startswith("slow_rank")]
    if planted:
        precision = f"{len(true) / len(accused):.2f}" if accused else "–"
        lines.append(
            f"\nPrecision {precision}, recall {len(true) / len(planted):.2f}, over all runs."
        )
    return "\n".join(lines) + "\n"


def run_campaign(folder: Path, seeds: int, only: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "verdicts.jsonl"
    done = {(row.name, row.seed) for row in read_rows(folder)}
    wanted = [(name, seed) for seed in range(seeds) for name in FAULTS]
    wanted += [("clean", seed) for seed in range(NUM_CLEAN * seeds // 10)]
    with tempfile.TemporaryDirectory(prefix="verdicts-") as scratch:
        stage = Stage(Path(scratch))
        try:
            for name, seed in wanted:
                if (name, seed) in done or (only and name not in only):
                    continue
                run_one(Plant.draw(name, seed), Path(scratch), stage, results)
        finally:
            stage.close()
    (folder / "table.md").write_text(table(read_rows(folder)))


def run_one(plant: Plant, scratch: Path, stage: Stage, results: Path) -> None:
    began_s = time.monotonic()
    folder = scratch / f"{plant.name}-{plant.seed}"
    try:
        outcome = run_planted(plant, folder, stage)
    except TimeoutError as error:  # the stall limit is learned: a busy machine makes it long
        print(f"not over in time, not counted: {plant.variable}: {error}", flush=True)
        return
    row = row_of(outcome, time.monotonic() - began_s)
    with open(results, "a") as file:
        file.write(json.dumps(asdict(row)) + "\n")
    mark = "right" if row.is_right else "WRONG"
    print(f"{mark}  {plant.variable}  of {plant.ranks}  {row.said}", flush=True)
    if not row.is_right:
        kept = results.parent / "wrong" / folder.name
        shutil.copytree(
            folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ask-*", "image")
        )
    shutil.rmtree(folder, ignore_errors=True)


def read_rows(folder: Path) -> list[Row]:
    try:
        lines = (folder / "verdicts.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Row(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    run_campaign(
        Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10, list(sys.argv[3:])
    )
