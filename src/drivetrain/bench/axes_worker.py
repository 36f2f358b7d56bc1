"""One rank of `drivetrain bench axes`: fsdp, tp and pp, ours and bare, in interleaved blocks."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.bench import arms, axes_arms
from drivetrain.bench.overhead_worker import WARM_UP_ROUNDS, Rounds
from drivetrain.bench.workloads import LEARNING_RATE, MAX_GRAD_NORM, transformer
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_TWO = 2
_PLAN = ["layers.*.linear1=colwise", "layers.*.linear2=rowwise"]
BARE = {"fsdp": arms.bare_fsdp, "tp": axes_arms.bare_tp, "pp": axes_arms.bare_pp}
OURS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": _TWO, "tensor": {"plan": _PLAN}},
    "pp": {"pp": _TWO},
}


def measure(axis: str, num_rounds: int, directory: str) -> dict[str, list[float]]:
    """Seconds per step of every arm, round by round, the warm-up left out."""
    workload = transformer()
    bare = BARE[axis]
    others = {"bare": bare(workload), "bare again": bare(workload)}
    rounds = Rounds(workload, others)
    copies = {"fsdp": _TWO, "tp": 1, "pp": axes_arms.NUM_MICRO_BATCHES}[axis]
    config = {
        "global_batch_size": workload.batch_size * copies,
        "micro_batch_size": workload.batch_size,
        "max_steps": workload.steps_per_block * (num_rounds + WARM_UP_ROUNDS),
        "output_dir": directory,
        "optimization": {
            "learning_rate": LEARNING_RATE,
            "max_grad_norm": MAX_GRAD_NORM,
            "lr_scheduler_type": "cosine",
        },
        "parallel": OURS[axis],
        "checkpoint": {"every_steps": None},
        "record": {"logging_steps": workload.steps_per_block},
    }
    Trainer(Task(workload.model, workload.loss), config, [rounds]).fit(workload.dataset())
    return {name: values[WARM_UP_ROUNDS:] for name, values in rounds.seconds_per_step.items()}


def main() -> None:
    """`… OUTPUT NUM_ROUNDS`: rank 0 writes the raw samples as JSON."""
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as directory:
        samples = {axis: measure(axis, num_rounds, directory) for axis in BARE}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
