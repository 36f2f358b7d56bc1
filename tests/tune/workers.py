"""32 trials of two ranks, by successive halving and as a population, on 1, 2 and 3 workers, and
with drivers and trials killed: the same trials, promotions and winner?

`python -m tests.tune.workers RESULTS [SEARCH …]` writes RESULTS/workers.md; with `--trials 9` and
`--kills 4` it is less of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core import locks
from tests.tune.on_targets import ENOUGH_S, ROOT, facts_of, winner_of

WORDS = ("max_steps=36", "evaluation.every_steps=12", "checkpoint.every_steps=4")
SPACES = {"successive halving": "digits_space.yaml", "population": "digits_population.yaml"}
Row = dict[str, Any]


def flags_of(search: str, num_trials: int) -> tuple[str, ...]:
    """All trials compete with each other; of a population one in eight is replaced."""
    if search == "population":
        return (f"--population={num_trials}", "--rungs=12", "--quantile=0.125")
    return (f"--trials={num_trials}", f"--generation={num_trials}", "--rungs=12,24")


def arms_of(num_kills: int) -> Mapping[str, tuple[int, int]]:
    """Workers and kills of each."""
    plain = {f"{num} worker{'s' if num > 1 else ''}": (num, 0) for num in (1, 2, 3)}
    return {**plain, f"2 workers, {num_kills} kills": (2, num_kills)}


def drive(flags: Sequence[str], study: Path, num_workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "drivetrain", "tune", "examples/digits.py"]
    command += [f"--study={study}", *flags, "--sampler=random", "--seed=1"]
    command += ["--nproc-per-trial=2", f"--parallel-trials={num_workers}", *WORDS]
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


def killed_on_the_way(flags: Sequence[str], study: Path, num_kills: int) -> list[str]:
    """Drivers and trials' launchers, at moments that a seed has drawn; what was killed."""
    chance = random.Random(7)  # noqa: S311 - no secret
    killed: list[str] = []
    driver = drive(flags, study, 2)
    while len(killed) < num_kills:
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
                driver = drive(flags, study, 2)
            continue
        raise AssertionError(f"over (exit code {code}) after {len(killed)} kills")
    assert driver.wait(ENOUGH_S) == 0
    return killed


def measure(search: str, num_trials: int, arm: tuple[int, int], study: Path) -> Row:
    began_s, killed = time.monotonic(), []
    flags = (f"--space=examples/{SPACES[search]}", *flags_of(search, num_trials))
    num_workers, num_kills = arm
    if num_kills:
        killed = killed_on_the_way(flags, study, num_kills)
    else:
        assert drive(flags, study, num_workers).wait(ENOUGH_S) == 0
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
        expected = arms["1 worker"]
        for arm, row in arms.items():
            keys = ("trials", "ended", "winner", "value", "sha256")
            same = all(row[key] == expected[key] for key in keys)
            lines.append(
                f"| {search} | {arm} | {len(row['trials'])} | {len(row['ended'])} | "
                f"{row['winner']} | {row['value']!r} | `{row['sha256'][:16]}…` | "
                f"{row['seconds']:.0f} | {'yes' if same else '**no**'} |"
            )
    return [*lines, ""]


def main(results: Path, searches: Sequence[str], num_trials: int, num_kills: int) -> None:
    """Measure, keep what was found (workers.json), and write the table."""
    file = results / "workers.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for search in searches or SPACES:
        found[search] = {}
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            for number, (title, arm) in enumerate(arms_of(num_kills).items()):
                study = Path(name) / str(number)
                found[search][title] = measure(search, num_trials, arm, study)
                file.write_text(json.dumps(found, indent=1) + "\n")
                found = json.loads(file.read_text())
                (results / "workers.md").write_text("\n".join(table(found)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("searches", nargs="*", metavar="SEARCH", help=", ".join(SPACES))
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--kills", type=int, default=10)
    said = parser.parse_args()
    main(said.results, said.searches, said.trials, said.kills)
