"""Lab: a slow training on two hosts, to be made fast without changing the result.

Measured alternately with the solution, from the steps that the runs have recorded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import STDOUT

import numpy as np

from drivetrain.learn.attempt import Shortcoming
from drivetrain.learn.exercises import exercise_named
from drivetrain.learn.labs import NUM_HOSTS, exit_code, require_hosts, why_it_failed
from drivetrain.learn.verdict import Passed, Score
from drivetrain.record.ledger import LABELS, ledger_of
from drivetrain.record.reading.run import open_run
from drivetrain.testing.hosts import Hosts, make_hosts
from drivetrain.verify.parity.compare import TOLERANCES, relative
from drivetrain.verify.scalars import step_scalars

NUM_STEPS = 60
SAVED_EVERY = 20
_WARM_UP = 10
_ROUNDS = 2
_ENOUGH = 0.75
"""Share of the solution's steps a second: two runs of one script differ by some tenths."""
_MUCH = 0.4
"""A wait with more than this share of the steps' time is reported first."""
_LINK_MBIT = 1000.0
_FINISH_S = 180.0
_WORDS = (
    f"max_steps={NUM_STEPS}",
    "record.logging_steps=1",
    "record.progress=none",
    "record.sinks=[]",
    "checkpoint.keep_last=100",
)
_WAITS = ("data_wait", "communication", "checkpoint", "evaluation")


@dataclass(frozen=True)
class Measured:
    """One run, from its own records."""

    step_s: float
    """Seconds per step, including waits and saves, without the first steps."""
    shares: Mapping[str, float]
    """Shares of the steps' time, by the ledger's classes."""
    losses: Mapping[int, float]
    saved: tuple[int, ...]


def check(file: Path) -> Passed:
    require_hosts("lab_slow")
    entrants = (file, exercise_named("lab_slow").solution)
    found: tuple[list[Measured], list[Measured]] = ([], [])
    with (
        tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as name,
        make_hosts(NUM_HOSTS, rate_mbit=_LINK_MBIT) as hosts,
    ):
        for number in range(_ROUNDS):
            for place, (script, runs) in enumerate(zip(entrants, found, strict=True)):
                run = Path(name) / f"run-{number}-{place}"
                _train(script, run, hosts)
                runs.append(measured(run))
    own, right = (min(runs, key=lambda run: run.step_s) for runs in found)
    return judged(own, right)


def _train(file: Path, run: Path, hosts: Hosts) -> None:
    """Run the same command on each host: they rendezvous through the run's directory."""
    log = run.with_suffix(".txt")
    command = [
        *(sys.executable, "-m", "drivetrain", "train", f"--nnodes={len(hosts)}"),
        *("--nproc-per-node=1", "--spares=0", f"--run-dir={run}", str(file), *_WORDS),
    ]
    # the machine's cores are shared by all hosts
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        nodes = [
            host.popen(command, env=environment, stdout=output, stderr=STDOUT) for host in hosts
        ]
    failed = [code for node in nodes if (code := exit_code(node, _FINISH_S)) != 0]
    if failed:
        raise why_it_failed(log.read_text(), failed[0])


def measured(run: Path) -> Measured:
    reading = open_run(run)
    start_s = np.sort(reading.steps(reading.ranks[0])["start_s"].astype(np.float64))[_WARM_UP:]
    ledger = ledger_of(reading)
    of_steps = {name: ledger.seconds[name] for name in (*_WAITS, "productive")}
    total_s = sum(of_steps.values()) or 1.0
    saved = sorted(
        int(path.parent.name.split("-")[1])
        for path in (run / "checkpoints").glob("step-*/manifest.json")
    )
    return Measured(
        step_s=float(start_s[-1] - start_s[0]) / (len(start_s) - 1),
        shares={name: seconds / total_s for name, seconds in of_steps.items()},
        losses={step: float(each["train/loss"]) for step, each in step_scalars(run).items()},
        saved=tuple(saved),
    )


def judged(own: Measured, right: Measured) -> Passed:
    _judge_training(own, right)
    speed = f"{1 / own.step_s:.1f} steps a second; the solution {1 / right.step_s:.1f}"
    if right.step_s / own.step_s < _ENOUGH:
        parts = sorted(own.shares.items(), key=lambda item: -item[1])
        said = ", ".join(f"{LABELS[name]} {share:.0%}" for name, share in parts if share > 0.005)
        raise Shortcoming(
            slowest(own.shares),
            f"at least {_ENOUGH:.0%} of the solution's steps a second, measured in turns",
            f"{speed}\nthe ledger of your steps: {said}",
        )
    return Passed(
        [
            f"{len(own.losses)} losses as in the slow training; saved every {SAVED_EVERY} steps",
            speed,
        ],
        [
            Score(
                "seconds a step",
                round(own.step_s, 4),
                round(right.step_s, 4),
                "the solution's, measured in turns",
                "s",
            )
        ],
    )


def _judge_training(own: Measured, right: Measured) -> None:
    if sorted(own.losses) != sorted(right.losses):
        found = f"{len(own.losses)} steps with a loss"
        raise Shortcoming("another-training", f"{NUM_STEPS} steps", found)
    for step, loss in right.losses.items():
        if not relative(own.losses[step], loss) < TOLERANCES["fp32"].loss:
            raise Shortcoming(
                "another-training",
                f"step {step}: loss {loss:.5f}, as in the slow training",
                f"step {step}: {own.losses[step]:.5f}",
            )
    moments = (0, *own.saved)
    if own.saved[-1:] != (NUM_STEPS,) or any(b - a > SAVED_EVERY for a, b in pairwise(moments)):
        raise Shortcoming(
            "not-saved",
            f"a checkpoint at least every {SAVED_EVERY} steps, and one at the end",
            f"saved after steps {list(own.saved)}",
        )


def slowest(shares: Mapping[str, float]) -> str:
    """Return the hint for the largest wait, or "compute" if no wait is large."""
    name = max(_WAITS, key=lambda each: shares.get(each, 0.0))
    return name.replace("_", "-") if shares.get(name, 0.0) > _MUCH else "compute"
