"""One rank of `benchmarks axes`: fsdp, tp and pp, ours and bare, in interleaved blocks."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

from benchmarks.steps import arms, axes_arms
from benchmarks.steps.interleaved import run_rank
from benchmarks.steps.overhead_worker import Samples, led_by_trainer
from benchmarks.steps.workloads import Workload, small_transformer, transformer

_TWO = 2
_PLAN = ["layers.*.linear1=colwise", "layers.*.linear2=rowwise"]
BARE = {"fsdp": arms.bare_fsdp, "tp": axes_arms.bare_tp, "pp": axes_arms.bare_pp}
OURS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "tp": {"tp": _TWO, "tensor": {"plan": _PLAN}},
    "pp": {"pp": _TWO},
}


def measure(num_rounds: int) -> Samples:
    """Seconds per step of every arm, axis by axis and round by round."""
    warnings.filterwarnings("ignore")
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as directory:
        for axis in BARE:
            for workload in (small_transformer(), transformer()):
                samples |= _measure(axis, workload, num_rounds, directory)
    return samples


def _measure(axis: str, workload: Workload, num_rounds: int, directory: str) -> Samples:
    bare = BARE[axis]
    others = {"bare": bare(workload), "bare again": bare(workload)}
    copies = {"fsdp": _TWO, "tp": 1, "pp": axes_arms.NUM_MICRO_BATCHES}[axis]
    return led_by_trainer(
        f"{axis}, {workload.name}",
        workload,
        others,
        num_rounds,
        global_batch_size=workload.batch_size * copies,
        micro_batch_size=workload.batch_size,
        output_dir=directory,
        parallel=OURS[axis],
    )


if __name__ == "__main__":
    run_rank(measure)
