"""32 trials of two ranks, by successive halving and as a population, on 1, 2 and 3 workers, and
with drivers and trials killed: the same trials, promotions and winner?

`python -m tests.tune.workers RESULTS [SEARCH …]` writes RESULTS/workers.md.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core import locks
from tests.tune.on_targets import ENOUGH_S, ROOT, facts_of, winner_of

NUM_TRIALS, NUM_KILLS = 32, 10
WORDS = ("max_steps=36", "evaluation.every_steps=12", "checkpoint.every_steps=4")
SEARCHES = {
    "successive halving": (
        "digits_space.yaml",
        (f"--trials={NUM_TRIALS}", f"--generation={NUM_TRIALS}", "--rungs=12,24"),
    ),
    "population": (
        "digits_population.yaml",
        (f"--population={NUM_TRIALS}", "--rungs=12", "--quantile=0.125"),
    ),
}
ARMS = ("1 worker", "2 workers", "3 workers", f"2 workers, {NUM_KILLS} kills")
Row = dict[str, Any]


def drive(search: str, study: Path, num_workers: int) -> subprocess.Popen[str]:
    space, flags = SEARCHES[search]
    command = [sys.executable, "-m", "drivetrain", "tune", "examples/digits.py"]
    command += [f"--space=examples/{space}", f"--study={study}", *flags, "--sampler=random"]
    command += ["--seed=1", "--nproc-per-trial=2", f"--parallel-trials={num_workers}", *WORDS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (study.parent / f"{study.name}.txt").open("a") as said:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=said, stderr=subprocess.STDOUT
        )


def launchers(study: Path) -> Iterator[int]:
    """Processes that hold a trial's run."""
    for lock in study.glob("trials/*/launcher.lock"):
        if (found := locks.holder(lock)) is not None:
            yield found[1]


def killed_on_the_way(search: str, study: Path) -> list[str]:
    """Drivers and trials' launchers, at moments that a seed has drawn; what was killed."""
    chance = random.Random(7)  # noqa: S311 - no secret
    killed: list[str] = []
    driver = drive(search, study, 2)
    while len(killed) < NUM_KILLS:
        try:
            code = driver.wait(chance.uniform(2, 20))
        except subprocess.TimeoutExpired:
            running = list(launchers(study))
            if running and len(killed) % 2:
                os.kill(chance.choice(running), signal.SIGKILL)
                killed.append("trial")
            else:
                driver.kill()
                driver.wait()
                killed.append("driver")
                driver = drive(search, study, 2)
            continue
        raise AssertionError(f"over (exit code {code}) after {len(killed)} kills")
    assert driver.wait(ENOUGH_S) == 0
    return killed


def measure(search: str, arm: str, folder: Path) -> Row:
    study = folder / arm.replace(" ", "-").replace(",", "")
    began_s, killed = time.monotonic(), []
    if "kills" in arm:
        killed = killed_on_the_way(search, study)
    else:
        assert drive(search, study, int(arm[0])).wait(ENOUGH_S) == 0
    asked, ended = facts_of(study)
    trial, value, sha256 = winner_of(study)
    return {
        "seconds": time.monotonic() - began_s,
        "killed": killed,
        "trials": [[each.trial, dict(each.values)] for each in asked],
        "ended": ended,
        "winner": trial,
        "value": value,
        "sha256": sha256,
    }


def table(found: dict[str, dict[str, Row]]) -> list[str]:
    lines = [
        "# One study on 1, 2 and 3 workers, and through kills",
        "",
        "`make tune-workers`: `examples/digits.py`, trials of two ranks. Same: trials with their "
        "values, the steps they came to, every value there and the winner's weights are those of "
        "one worker, to the last bit. Killed with SIGKILL: drivers and trials' launchers in turn.",
        "",
        "| search | arm | trials | stretches trained | winner | loss | SHA-256 | seconds | same |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for search, arms in found.items():
        expected = arms[ARMS[0]]
        for arm, row in arms.items():
            keys = ("trials", "ended", "winner", "value", "sha256")
            same = all(row[key] == expected[key] for key in keys)
            lines.append(
                f"| {search} | {arm} | {len(row['trials'])} | {len(row['ended'])} | "
                f"{row['winner']} | {row['value']!r} | `{row['sha256'][:16]}…` | "
                f"{row['seconds']:.0f} | {'yes' if same else '**no**'} |"
            )
    return [*lines, ""]


def main(results: Path, searches: Sequence[str]) -> None:
    """Measure, keep what was found (workers.json), and write the table."""
    file = results / "workers.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for search in searches or SEARCHES:
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            for arm in ARMS:
                found.setdefault(search, {})[arm] = measure(search, arm, Path(name))
                file.write_text(json.dumps(found, indent=1) + "\n")
                found = json.loads(file.read_text())
                (results / "workers.md").write_text("\n".join(table(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
