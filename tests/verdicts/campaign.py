"""Every fault with several seeds, and clean runs: python -m tests.verdicts.campaign FOLDER

Appends to FOLDER/verdicts.jsonl, a row per run, and writes FOLDER/table.md from all of it: a
campaign that was cut off goes on where it stood. Slow ranks, links and disks and clean runs are
judged by their timing: the campaign goes before other work on the machine (needs root), and each
row says how much of that there was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from drivetrain.diagnose import slow, straggler
from drivetrain.record.reading import open_run
from tests.verdicts.faults import FAULTS, Plant, score
from tests.verdicts.machine import Neighbours, own_account
from tests.verdicts.running import Outcome, Stage, run_planted

_BEFORE_OTHERS = -19
"""Niceness: who else wants a processor gets what the ranks leave."""


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
    others: float
    """Processors that others kept busy meanwhile."""

    @property
    def is_right(self) -> bool:
        if self.name == "clean":
            return self.found is None
        return self.kind_right and self.rank_right and self.line_right


def row_of(outcome: Outcome, took_s: float, others: float) -> Row:
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
        round(others, 3),
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


@dataclass(frozen=True)
class Campaign:
    """Where it runs, and what it writes."""

    folder: Path
    scratch: Path
    stage: Stage
    account: Path

    def run(self, plant: Plant) -> None:
        """One run, written down."""
        began_s, neighbours = time.monotonic(), Neighbours(self.account)
        folder = self.scratch / f"{plant.name}-{plant.seed}"
        try:
            outcome = run_planted(plant, folder, self.stage)
            row = row_of(outcome, time.monotonic() - began_s, neighbours.busy())
            self._keep(row, folder)
            if plant.name == "clean":
                keep_steps(self.folder, plant.seed, outcome.run_dir)
        except TimeoutError as error:
            print(f"not over in time, not counted: {plant.variable}: {error}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, row: Row, run: Path) -> None:
        with open(self.folder / "verdicts.jsonl", "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        mark = "right" if row.is_right else "WRONG"
        print(f"{mark}  {row.name} {row.seed}: others {row.others:.2f}  {row.said}", flush=True)
        if not row.is_right:
            rest = shutil.ignore_patterns("ask-*", "image")
            kept = Path("build/wrong-verdicts") / run.name
            shutil.copytree(run, kept, dirs_exist_ok=True, ignore=rest)


def keep_steps(folder: Path, seed: int, run_dir: Path) -> None:
    """A clean run's steps, for `tests.verdicts.replay`."""
    run = open_run(run_dir)
    _, laps, _ = slow.read_laps(run, run.attempts()[-1])
    own_ms, lap_ms = (np.round(v * 1e3, 2).tolist() for v in (laps.own_s, laps.lap_s.max(axis=0)))
    with open(folder / "clean-steps.jsonl", "a") as file:
        file.write(json.dumps({"seed": seed, "own_ms": own_ms, "lap_ms": lap_ms}) + "\n")


def run_campaign(folder: Path, wanted: list[tuple[str, int]], most_s: float) -> None:
    """What of it is not done yet, until the time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    os.nice(_BEFORE_OTHERS)
    until_s = time.monotonic() + most_s
    done = {(row.name, row.seed) for row in read_rows(folder)}
    with own_account() as account, tempfile.TemporaryDirectory(prefix="verdicts-") as scratch:
        stage = Stage(Path(scratch))
        campaign = Campaign(folder, Path(scratch), stage, account)
        try:
            for name, seed in wanted:
                if (name, seed) not in done and time.monotonic() < until_s:
                    campaign.run(Plant.draw(name, seed))
        finally:
            stage.close()
    rows = read_rows(folder)
    (folder / "table.md").write_text(table(rows))
    missing = len(set(wanted) - {(row.name, row.seed) for row in rows})
    print(f"{len(rows)} runs are done, {missing} of these are left", flush=True)


def read_rows(folder: Path) -> list[Row]:
    try:
        lines = (folder / "verdicts.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Row(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean", type=int, default=50, help="number of clean runs")
    parser.add_argument("--only", nargs="*", choices=[*FAULTS, "clean"])
    parser.add_argument("--most-s", type=float, default=1e9, help="stop after so many seconds")
    asked = parser.parse_args()
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    wanted = [(name, seed) for seed in seeds for name in FAULTS]
    wanted += [("clean", asked.first_seed + number) for number in range(asked.clean)]
    run_campaign(
        asked.folder,
        [(name, seed) for name, seed in wanted if not asked.only or name in asked.only],
        asked.most_s,
    )


if __name__ == "__main__":
    main()
