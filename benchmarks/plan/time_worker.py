"""One rank that trains every predicted plan of a place, in turns, and notes its steps' seconds."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.plan.models import MODELS, make_optimizer
from drivetrain.cluster.environments import detect
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

NUM_STEPS, WARM_UP = 3, 1


class _Stopwatch(Hook):
    """From the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """A step is over."""
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        """Without the first ones, which make what the others find."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)][WARM_UP - 1 :]


def train(plan: dict[str, Any], folder: str) -> list[float]:
    """Seconds of a few steps."""
    bench = MODELS[plan["model"]]
    samples = plan["layout"]["dp_replicate"] * plan["layout"]["dp_shard"]
    samples *= plan["micro_batch_size"] * plan["accumulation"]
    settings: dict[str, Any] = {
        "global_batch_size": samples,
        "max_steps": NUM_STEPS,
        "output_dir": folder,
        "checkpoint.every_steps": None,
        "record.progress": "none",
        "record.sinks": [],
        "sentinel.every_steps": None,
        **plan["settings"],
    }

    def optimizer(parameters: Any, _: Any) -> Any:
        return make_optimizer("adamw", list(parameters))

    watch = _Stopwatch()
    trainer = Trainer(Task(bench.model, bench.loss, optimizer), settings, hooks=[watch])
    trainer.fit(bench.dataset(samples))
    gc.collect()
    return watch.steps


def main() -> None:
    """Every plan, `rounds` times; rank 0 writes."""
    warnings.filterwarnings("ignore")
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    plans = json.loads((folder / "predicted.json").read_text())["plans"]
    measured: list[list[float]] = [[] for _ in plans]
    with tempfile.TemporaryDirectory() as run:
        for _ in range(rounds):
            for plan, steps in zip(plans, measured, strict=True):
                steps.extend(train(plan, run))
    if detect().rank == 0:
        (folder / "measured.json").write_text(json.dumps({"steps_s": measured}) + "\n")


if __name__ == "__main__":
    main()
