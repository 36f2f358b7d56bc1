"""What is known about the ranks before torch is imported: from flags and a Slurm step."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drivetrain.cluster.environments import SlurmEnvironment
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.memory import usable_bytes
from drivetrain.core.text import counted, readable_bytes
from drivetrain.launch.command import Command, add_our_flags, add_torchruns_flags, parse_command
from drivetrain.record.session import ACCEPT_CHANGE, COMMAND_S, NODE_SESSION, RUN_DIR
from drivetrain.supervise.policy import Budgets
from drivetrain.supervise.processes.head_start import HeadStart

# Inside a Slurm allocation: `srun --ntasks-per-node=1 drivetrain train …` is one run on all nodes.
#
# Slurm says how many nodes its step has; without that, each node would train alone.


@dataclass(frozen=True)
class Step:
    """The nodes of a Slurm step, and an id of this start of it."""

    num_nodes: int
    life: str


def nodes_of_step(variables: Mapping[str, str], run_dir: str | None) -> Step | None:
    """Read srun's variables; None outside a step, or on one node."""
    if not SlurmEnvironment.detect(variables):
        return None
    num_nodes = int(variables.get("SLURM_STEP_NUM_NODES", "1"))
    num_tasks = int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    problems = []
    if num_tasks > num_nodes:
        rule = f"srun started {num_tasks} supervisors on {num_nodes} node{'s' * (num_nodes > 1)}"
        remedy = "start one per node, which starts the ranks: srun --ntasks-per-node=1"
        problems.append(Problem("drivetrain train", rule, remedy, has_value=False))
    if num_nodes > 1 and run_dir is None:
        rule = f"the {num_nodes} nodes of this step need a shared directory for rendezvous"
        remedy = "--run-dir DIR, on storage that all nodes share"
        problems.append(Problem("--run-dir", rule, remedy, has_value=False))
    if problems:
        raise ConfigError(problems)
    if num_nodes == 1:
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Step(num_nodes, "-".join(variables.get(name, "0") for name in names))


# What the ranks of a node get from the command line, before the rendezvous.

_FLIGHT_RECORDERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Both of torch's flight recorders, the shared one and NCCL's, read the first; the second is its
old name, about which torch warns."""


def variables_of_ranks(
    run_dir: str | None, num_ranks: int | None, accepted_changes: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables to add; `num_ranks` is None if torch must count the devices."""
    wanted: dict[str, str] = {}
    if run_dir is not None:
        wanted[RUN_DIR] = str(Path(run_dir).absolute())
    if accepted_changes:
        wanted[ACCEPT_CHANGE] = ",".join(accepted_changes)
    if "OMP_NUM_THREADS" not in os.environ and num_ranks is not None:
        # each process gets its share of the cores, unless the user has set it
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        wanted["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // num_ranks))
    if not any(name in os.environ for name in _FLIGHT_RECORDERS):
        # the latest collectives of each rank, for diagnosing a hang
        wanted[_FLIGHT_RECORDERS[0]] = "512"
    return wanted


def command_of_ranks(command: Command) -> tuple[str, ...]:
    """Return the script or module and its arguments."""
    return (*(["-m"] if command.is_module else []), command.script, *command.script_args)


def budgets_of(args: argparse.Namespace, given: set[str]) -> Budgets:
    """Return the restart budgets; `given` holds the flags that the user gave."""
    asks_for_restarts = "--max-restarts" in given
    restarts = int(args.max_restarts) if asks_for_restarts else Budgets.failures
    return Budgets(
        failures=restarts,
        preemptions=args.max_preemptions,
        start_ups=args.max_startup_failures,
        restarts_anything=asks_for_restarts and restarts > 0,
    )


# Start the ranks before torch is imported, if possible.
#
# That is possible only if the command line alone determines them: on one machine, with flags that
# give their number or time limits. All other command lines go the usual way, where torchrun's own
# parser reads them and reports errors.

_UNDERSTOOD = {
    "--nproc-per-node",
    "--nnodes",
    "--standalone",
    "-m",
    "--module",
    "--run-dir",
    "--accept-change",
    "--spares",
    "--max-restarts",
    "--max-preemptions",
    "--max-startup-failures",
    "--grace-period",
    "--stall-timeout",
    "--slow-timeout",
}
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dri", "/dev/dxg")
"""If none of these exists, there is no GPU that torch itself supports."""
_ENTRY_POINTS = "*-info/entry_points.txt"


def start_early(argv: Sequence[str]) -> HeadStart | None:
    """Start the ranks; None if the supervisor must start them."""
    if not {NODE_SESSION, COMMAND_S} <= os.environ.keys() or _is_set_by_torchruns_variables():
        return None
    try:
        command, args, given = parsed(argv)
        num_ranks = _num_ranks(args)
        if not given <= _UNDERSTOOD or num_ranks is None or not is_alone(args, given):
            return None
        num_restarts = budgets_of(args, given).failures
    except (ConfigError, argparse.ArgumentError, ValueError):
        return None  # reported by the parser that reads it next
    rank_argv = command_of_ranks(command)
    if rank_argv[0] != "-m" and not Path(command.script).is_file():
        return None
    os.environ.update(variables_of_ranks(args.run_dir, num_ranks, args.accept_change))
    session = Path(os.environ.pop(NODE_SESSION))  # for the supervisor only, not for its ranks
    return HeadStart(rank_argv, session, num_ranks, num_restarts)


def starting_line(argv: Sequence[str]) -> str | None:
    """Return what is being started, to be printed at once: ranks are silent while they import.

    None for one of several nodes, and for a command that the supervisor may refuse.
    """
    try:
        command, args, given = parsed(argv)
        if not is_alone(args, given) or _is_set_by_torchruns_variables():
            return None
    except (ConfigError, argparse.ArgumentError, ValueError):
        return None
    is_there = args.no_python or command.is_module or Path(command.script).is_file()
    num_ranks = _num_ranks(args)
    if not is_there or (num_ranks is None and args.nproc_per_node is not None):
        return None
    how_many = "one process per device" if num_ranks is None else counted(num_ranks, "process")
    return f"starting {how_many} on this machine"


_LEAST_RANK_MIB = 200
"""Held by a process that has imported torch and trained one small layer: 236 MB (torch 2.13)."""


def too_many_for_memory(num_ranks: int, *, shares_imports: bool) -> Problem | None:
    """Refuse what can only end with a machine out of memory, which ends more than this command."""
    usable = usable_bytes()
    if shares_imports or usable is None:  # forked ranks share what is imported
        return None
    if num_ranks * _LEAST_RANK_MIB * 2**20 <= usable:
        return None
    rule = (
        f"{readable_bytes(usable)} of memory can be used here, and a process that trains holds at "
        f"least {_LEAST_RANK_MIB} MiB"
    )
    remedy = f"start fewer, or use `drivetrain rehearse --world-size {num_ranks}`"
    return Problem("--nproc-per-node", rule, remedy, num_ranks)


def parsed(argv: Sequence[str]) -> tuple[Command, argparse.Namespace, set[str]]:
    """Parse the command, its flags and the given ones; without torch, and so unchecked."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_torchruns_flags(parser)
    add_our_flags(parser)
    command = parse_command(argv, parser)
    given = {word.partition("=")[0] for word in command.launcher_args}
    return command, parser.parse_args(list(command.launcher_args)), given


def _is_set_by_torchruns_variables() -> bool:
    return any(name.startswith("PET_") for name in os.environ)


def _num_ranks(args: argparse.Namespace) -> int | None:
    """The requested number, or 1 if there is no GPU; None if torch decides or it is refused."""
    if args.nproc_per_node is None:
        return None if _may_have_devices() else 1
    if not args.nproc_per_node.isdigit():
        return None
    number = int(args.nproc_per_node)
    return None if too_many_for_memory(number, shares_imports=args.warm_start) else number or None


def _may_have_devices() -> bool:
    return any(Path(path).exists() for path in _DRIVERS) or _has_vendors_package()


@cache  # the guardian asks, and the supervisor that it forks
def _has_vendors_package() -> bool:
    """True if a package adds a device to torch. `importlib.metadata` is seven times slower."""
    files = (file for folder in sys.path for file in Path(folder).glob(_ENTRY_POINTS))
    return any("[torch.backends]" in file.read_text(encoding="utf-8") for file in files)


def is_alone(args: argparse.Namespace, given: set[str]) -> bool:
    """True if this node is the whole run."""
    if given & {"--nnodes", "--standalone"}:
        return args.standalone or args.nnodes in ("1", "1:1")
    return nodes_of_step(os.environ, args.run_dir) is None
