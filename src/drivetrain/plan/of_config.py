"""The planner's prediction for one given config, without a search.

`python -m drivetrain.plan.of_config OUTPUT WHAT` runs it in a separate process, because it executes
the script up to `Trainer.fit`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drivetrain.cluster.file import load_cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.bounded import one_line
from drivetrain.core.errors import DrivetrainError
from drivetrain.core.files import write_whole
from drivetrain.data.batches import BatchPlan, solve_micro_batch
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.prospect import Asking, Prospect


def candidate_of(config: RunConfig, layout: Layout) -> Candidate:
    """Return the candidate for a config whose micro-batch size is set."""
    parallel = config.parallel
    schedule = parallel.pipeline.schedule
    if schedule not in ("1f1b", "gpipe"):
        raise NotImplementedError("the planner supports only the schedules 1f1b and gpipe")
    if parallel.tensor.loss_parallel:
        raise NotImplementedError("the planner does not support loss_parallel")
    size = config.micro_batch_size
    if size == "auto":
        raise AssertionError("a micro-batch is chosen before")
    return Candidate(
        layout,
        parallel.strategy,
        micro_batch_size=size,
        accumulation=BatchPlan(config.global_batch_size, size, layout.dp, None).accumulation,
        precision=config.precision.dtype,
        recompute=config.memory.activation_checkpointing,
        sequence_parallel=parallel.tensor.sequence_parallel,
        offload=config.memory.offload,
        schedule=schedule,
        options=parallel.options,
    )


def prospect(asking: Asking) -> Prospect:
    """Run the script up to `Trainer.fit` and predict the run.

    Config errors are returned as `unknown`: the run itself will report them.
    """
    try:
        return _prospect(asking)
    except (DrivetrainError, NotImplementedError) as error:
        return Prospect(unknown=one_line(error))


def _prospect(asking: Asking) -> Prospect:
    from drivetrain.parallel.world import layout_from
    from drivetrain.plan.cost.estimate import memory_limit, rank_memory
    from drivetrain.plan.profile.model import Way
    from drivetrain.plan.profile.profiling import Profiler
    from drivetrain.plan.profile.sources import from_script

    found = from_script(asking.script, asking.script_args)
    if found.resolved is None:
        raise AssertionError("a script has a config")
    world_size = asking.num_nodes * asking.ranks_per_node
    layout = layout_from(found.resolved.config.parallel, world_size)
    config = solve_micro_batch(found.resolved, layout.dp).config
    profiler = Profiler(found.subject)
    candidate = candidate_of(config, layout)
    per_sample = profiler.profile(Way(candidate.precision)).flops(1.0)
    flops = per_sample * config.global_batch_size
    if not asking.cluster:
        return Prospect(flops_per_step=flops)
    cluster = replace(
        load_cluster(asking.cluster),
        num_nodes=asking.num_nodes,
        devices_per_node=asking.ranks_per_node,
    )
    accelerated = cluster.device is None or cluster.device.is_accelerator
    memory = rank_memory(profiler, candidate, on_accelerator=accelerated)
    return Prospect(memory.total, memory_limit(cluster), flops)


def main(argv: Sequence[str]) -> int:
    """Write the answer to a file, because the script may print to standard output."""
    output, said = argv
    document: dict[str, Any] = json.loads(said)
    asking = Asking(**{**document, "script_args": tuple(document["script_args"])})
    write_whole(Path(output), json.dumps(asdict(prospect(asking))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
