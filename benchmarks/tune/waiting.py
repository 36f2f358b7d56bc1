"""`python -m benchmarks.tune.waiting FOLDER`: how long workers wait for a deterministic schedule.

Nothing is trained and no clock is read: the study's own decisions (`drivetrain.tune.decide`) are
asked by simulated workers. A run from one rung to the next takes its steps times a factor that is
drawn for each trial, log-normal with mean 1. Waiting is the part of the workers' time, from the
first start to the last end, in which one had nothing to do.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.tune import decide
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Promoted, State
from drivetrain.tune.settings import Settings

WORKERS = (2, 4, 8, 16)
SPREADS = (0.0, 0.1, 0.3, 1.0)
"""Standard deviation of a trial's seconds a step, over its mean."""
NUM_DRAWS = 20
NUM_TRIALS = 96
STUDIES: Mapping[str, Mapping[str, Any]] = {
    "deterministic, generation 8": {"generation": 8},
    "deterministic, generation 32": {"generation": 32},
    "deterministic, generation 8, `random`": {"generation": 8, "sampler": "random"},
    "eager": {"schedule": "eager"},
}
RUNGS = {"no rungs": (), "rungs at 1/9 and 1/3": (1, 3)}
LAST_STEP = 9


@dataclass(frozen=True)
class Course:
    """How one study went."""

    seconds: float
    waited: float
    """A part of all workers' time."""
    steps: float
    """Trained in all; eagerly more trials are promoted."""


def simulate(settings: Settings, num_workers: int, spread: float, seed: int) -> Course:
    """Workers take what may begin, in the order in which it should, and wait where nothing may."""
    rng = random.Random(f"{seed}/{spread}")  # noqa: S311
    sigma = math.sqrt(math.log(1 + spread**2))
    speeds = [rng.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(settings.num_trials)]
    values = [rng.random() for _ in range(settings.num_trials)]
    ends = [0, *settings.rungs, LAST_STEP]
    state, now, busy, steps = State(), 0.0, 0.0, 0.0
    running: list[tuple[float, Work]] = []
    while True:
        work = _next(settings, state, {each for _, each in running})
        if work is not None and len(running) < num_workers:
            length = ends[work.rung + 1] - ends[work.rung]
            took = length * speeds[work.trial]
            heapq.heappush(running, (now + took, work))
            busy, steps = busy + took, steps + length
            continue
        if not running:
            return Course(now, 1 - busy / (now * num_workers), steps)
        now, work = heapq.heappop(running)
        # trials that are good early mostly are late
        value = values[work.trial] + rng.gauss(0.0, 0.1 / (work.rung + 1))
        state.take(Ended(work.trial, work.rung, "done", ends[work.rung + 1], value))
        if settings.schedule == "eager":
            for each in decide.newly_promoted(settings, state):
                state.take(Promoted(each.trial, each.rung))


def _next(settings: Settings, state: State, running: set[Work]) -> Work | None:
    """As the driver does; what values a trial has decides nothing here."""
    for work in decide.ready(settings, state):
        if work not in running:
            return work
    trial = decide.next_trial(settings, state)
    if trial is None:
        return None
    state.take(Asked(trial, {}))
    return _next(settings, state, running)


def measure() -> list[dict[str, Any]]:
    """Every cell of the table, with the median over the draws."""
    found = []
    for rungs, steps in RUNGS.items():
        for study, changes in STUDIES.items():
            settings = Settings("train.py", (), NUM_TRIALS, rungs=steps, **changes)
            for num_workers in WORKERS:
                for spread in SPREADS:
                    courses = [
                        simulate(settings, num_workers, spread, seed) for seed in range(NUM_DRAWS)
                    ]
                    found.append(
                        {
                            "rungs": rungs,
                            "study": study,
                            "workers": num_workers,
                            "spread": spread,
                            "waited": median(each.waited for each in courses),
                            "seconds": median(each.seconds for each in courses),
                            "steps": median(each.steps for each in courses),
                        }
                    )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        "# What determinism costs in waiting",
        "",
        f"`benchmarks/tune/waiting.py`: {NUM_TRIALS} trials, simulated with the study's own"
        f" decisions; a trial's seconds a step are drawn, log-normal. Part of the workers' time in"
        f" which one had nothing to do, median of {NUM_DRAWS} draws; 0.3 is the standard deviation"
        " over the mean.",
    ]
    for rungs in RUNGS:
        lines += ["", f"**{rungs}**", ""]
        lines.append(
            "| schedule | workers | " + " | ".join(f"spread {s:g}" for s in SPREADS) + " |"
        )
        lines.append("| --- | ---: |" + " ---: |" * len(SPREADS))
        for study in STUDIES:
            for num_workers in WORKERS:
                cells = [
                    f"{each['waited']:.0%}"
                    for each in found
                    if (each["rungs"], each["study"], each["workers"])
                    == (rungs, study, num_workers)
                ]
                lines.append(f"| {study} | {num_workers} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main(folder: Path) -> None:
    """Write both files, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    found = measure()
    (folder / "waiting.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "waiting.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
