"""Inside a Slurm allocation: `srun --ntasks-per-node=1 drivetrain train …` is one run on all nodes.

Slurm says how many nodes its step has; without that each of them would train alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.cluster.environments import Slurm
from drivetrain.core.errors import ConfigError, Problem


@dataclass(frozen=True)
class Step:
    """The nodes of this step, and a name for this life of it."""

    num_nodes: int
    life: str


def nodes_of_step(variables: Mapping[str, str], run_dir: str | None) -> Step | None:
    """What srun's variables say; None outside a step, or on one node."""
    if not Slurm.detect(variables):
        return None
    num_nodes = int(variables.get("SLURM_STEP_NUM_NODES", "1"))
    num_tasks = int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    problems = []
    if num_tasks > num_nodes:
        rule = f"srun started {num_tasks} of them on {num_nodes} node{'s' * (num_nodes > 1)}"
        remedy = "one per node starts the ranks itself: srun --ntasks-per-node=1"
        problems.append(Problem("drivetrain train", rule, remedy, has_value=False))
    if num_nodes > 1 and run_dir is None:
        rule = f"the {num_nodes} nodes of this step need a place to meet"
        remedy = "--run-dir DIR, on storage that all of them share"
        problems.append(Problem("--run-dir", rule, remedy, has_value=False))
    if problems:
        raise ConfigError(problems)
    if num_nodes == 1:
        return None
    words = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Step(num_nodes, "-".join(variables.get(word, "0") for word in words))
