"""What the ranks of a node get from their command line, before anybody has met."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from drivetrain.launch.command import Command
from drivetrain.record.session import ACCEPT_CHANGE, RUN_DIR
from drivetrain.supervise.policy import Budgets

_FLIGHT_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Both of torch's recorders, the shared one and NCCL's, read the first; the second is its old name,
of which torch warns when it is set."""


def variables_of_ranks(
    run_dir: str | None, num_ranks: int | None, accepted_changes: Sequence[str] = ()
) -> dict[str, str]:
    """What is not in the environment yet; `num_ranks` is None where torch is to count devices."""
    wanted: dict[str, str] = {}
    if run_dir is not None:
        wanted[RUN_DIR] = str(Path(run_dir).absolute())
    if accepted_changes:
        wanted[ACCEPT_CHANGE] = ",".join(accepted_changes)
    if "OMP_NUM_THREADS" not in os.environ and num_ranks is not None:
        # each process gets its share of the cores, unless the user has said otherwise
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        wanted["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // num_ranks))
    if not any(name in os.environ for name in _FLIGHT_RECORDERS):
        # the latest collectives of each rank, for the verdict on a hang
        wanted[_FLIGHT_RECORDERS[0]] = "512"
    return wanted


def command_of_ranks(command: Command) -> tuple[str, ...]:
    """The script or module and its arguments."""
    return (*(["-m"] if command.is_module else []), command.script, *command.script_args)


def budgets_of(args: argparse.Namespace, given: set[str]) -> Budgets:
    """How often to start again; `given` are the flags that were typed."""
    asks_for_restarts = "--max-restarts" in given
    restarts = int(args.max_restarts) if asks_for_restarts else Budgets.failures
    return Budgets(
        failures=restarts,
        preemptions=args.max_preemptions,
        start_ups=args.max_startup_failures,
        restarts_anything=asks_for_restarts and restarts > 0,
    )
