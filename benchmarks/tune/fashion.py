"""`python -m benchmarks.tune.fashion FOLDER [SEARCH …]`: real studies on Fashion-MNIST.

Each is `drivetrain tune` as one would type it: trials are launched runs of two ranks, each judged
by the loss over all 10,000 validation images. Small and short: what is shown is that the searches
run to their end on real data, what they find, and how many steps they train.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.record.reading import open_run
from drivetrain.tune import decide
from drivetrain.tune.journal import State, read_journal
from drivetrain.tune.settings import load_study

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/tune/fashion_trial.py"
SPACE = """
parameters:
  optimization.learning_rate: {low: 1e-3, high: 1.0, log: true}
  optimization.momentum: {low: 0.0, high: 0.95}
  optimization.weight_decay: {low: 1e-6, high: 1e-2, log: true}
"""
RANKS = ("--nproc-per-trial=2", "--parallel-trials=2")
SEARCHES: dict[str, tuple[str, ...]] = {
    "random": ("--trials=4", "--sampler=random"),
    "TPE": ("--trials=14", "--generation=5"),
    "halving, pause": ("--trials=6", "--generation=6", "--rungs=30"),
    "halving, stop": ("--trials=6", "--generation=3", "--rungs=30", "--promote=stop"),
    "population": ("--population=3", "--rungs=30,60", "--sampler=random"),
}


def run(search: str, folder: Path) -> dict[str, Any]:
    """One study, to its end."""
    space, study = folder / "space.yaml", folder / search.replace(", ", "-").lower()
    space.write_text(SPACE)
    words = ["tune", SCRIPT, f"--space={space}", f"--study={study}", *RANKS, *SEARCHES[search]]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
    return {"seconds": time.monotonic() - began_s, **facts(study), "said": done.stdout}


def facts(path: Path) -> dict[str, Any]:
    study, state = load_study(path), read_journal(path)
    best = decide.winner(study.settings, state)
    if best is None:
        raise RuntimeError("no trial has a value")
    accuracy = open_run(study.run_dir(best.trial)).scalars()["val/accuracy"]
    return {
        "trials": len(state.asked),
        "stretches": len(state.ended),
        "steps": steps_of(state),
        "winner": best.trial,
        "loss": best.value,
        "accuracy": float(accuracy.values[-1]),
        "values": dict(state.asked[best.trial].values),
        "ended": [
            [each.trial, each.rung, each.outcome, each.step, each.value]
            for each in state.ended.values()
        ],
    }


def steps_of(state: State) -> int:
    """Trained by all trials; a fork begins at its donor's."""
    found = 0
    for asked in state.asked:
        last = state.last(asked.trial)
        begun = 0 if asked.fork is None else asked.fork.step
        found += 0 if last is None else max(0, last.step - begun)
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        "# Studies on Fashion-MNIST",
        "",
        f"`make tune-fashion` ({found['machine']}): `drivetrain tune {SCRIPT}`, trials of two ranks"
        " and 90 steps at most, two at a time; the loss is that of all 10,000 validation images.",
        "",
        "| search | trials | launched | steps | best loss | its accuracy | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for search, row in found["studies"].items():
        counts = f"{row['trials']} | {row['stretches']} | {row['steps']:,}"
        figures = f"{row['loss']:.4f} | {row['accuracy']:.1%} | {row['seconds']:.0f}"
        flags = " ".join(SEARCHES[search])
        lines.append(f"| {search} (`{flags}`) | {counts} | {figures} |")
    return "\n".join([*lines, ""])


def main(folder: Path, searches: Sequence[str]) -> None:
    """Run them, keep what was found (fashion.json), and write the table."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "fashion.json"
    found = json.loads(file.read_text()) if file.exists() and searches else {"studies": {}}
    found["machine"] = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory(prefix="tune-fashion-") as name:
        for search in searches or SEARCHES:
            found["studies"][search] = run(search, Path(name))
            file.write_text(json.dumps(found, indent=1) + "\n")
            (folder / "fashion.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
