"""One rank that trains each configuration for two steps and notes the most that was alive.

Measured from torch's own allocator: the profiler's memory events, every allocation and release of
the CPU allocator in order, added up. From before the model is made to the end of the last step.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan.cases import Case, cases
from benchmarks.plan.models import MODELS, make_optimizer
from drivetrain.cluster.environments import detect
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

NUM_STEPS = 2
_END = "the last step is over"


class _Marks(Hook):
    """Where the training ends and what follows (writing weights) begins."""

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Mark it in the profile."""
        with torch.profiler.record_function(_END):
            pass


def measure(case: Case, folder: str) -> float:
    """Peak live bytes on this rank."""
    candidate = case.candidate
    bench = MODELS[case.model]
    settings: dict[str, Any] = {
        "global_batch_size": candidate.global_batch_size,
        "max_steps": NUM_STEPS,
        "output_dir": folder,
        "checkpoint.every_steps": None,
        "record.progress": "none",
        "record.sinks": [],
        "sentinel.every_steps": None,
        **candidate.settings(),
    }
    data = bench.dataset(candidate.global_batch_size)

    def optimizer(parameters: Any, _: Any) -> torch.optim.Optimizer:
        return make_optimizer(case.optimizer, list(parameters))

    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        trainer = Trainer(Task(bench.model, bench.loss, optimizer), settings, hooks=[_Marks()])
        trainer.fit(data)
    del trainer
    return peak_of(profile)


def peak_of(profile: Any) -> float:
    """The highest sum of what was allocated and not yet released."""
    events = profile.profiler.kineto_results.events()
    end = min(event.start_ns() for event in events if event.name() == _END)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    live = peak = 0
    for when, change in changes:
        if when > end:
            break
        live += change
        peak = max(peak, live)
    return float(peak)


def _measured(folder: Path, world_size: int) -> set[str]:
    """Cases that every rank has measured: all ranks must leave out the same ones."""
    paths = [folder / f"measured-{world_size}-{rank}.json" for rank in range(world_size)]
    each = [set(json.loads(path.read_text())) if path.exists() else set() for path in paths]
    return set.intersection(*each)


def main() -> None:
    """Every case of this number of ranks that has not been measured, or those named."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    output, names = Path(sys.argv[1]), set(sys.argv[2:])
    output.mkdir(parents=True, exist_ok=True)
    identity = detect()
    path = output / f"measured-{identity.world_size}-{identity.rank}.json"
    found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    done = set() if names else _measured(output, identity.world_size)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if case.candidate.layout.world_size != identity.world_size:
                continue
            if case.name in done or (names and case.name not in names):
                continue
            found[case.name] = measure(case, folder)
            gc.collect()
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
