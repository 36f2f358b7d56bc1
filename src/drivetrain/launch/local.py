"""Ranks on this machine (or this node of several), by torch's elastic launcher."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.command import Command, parse_command
from drivetrain.launch.failure import RankFailure, root_cause, verdict

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def launch(words: Sequence[str]) -> int:
    """Start the ranks of a command line and wait for them; the exit code for the shell."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    command = parse_command(words, parser)
    args = parser.parse_args(command.torchrun_args)
    _check_script(command, args)
    _fill_in(args, command)
    with _shared_cores(args.nproc_per_node):
        return _run(args, command)


def _check_script(command: Command, args: argparse.Namespace) -> None:
    if not args.module and not args.no_python and not Path(command.script).is_file():
        raise ConfigError(
            [Problem("SCRIPT", "no such file", "give the path of your script", command.script)]
        )


def _fill_in(args: argparse.Namespace, command: Command) -> None:
    """What torchrun leaves to the user: all devices, and a free port."""
    import torch

    given = {word.partition("=")[0] for word in command.launcher_args}
    if "--nproc-per-node" not in given and "PET_NPROC_PER_NODE" not in os.environ:
        args.nproc_per_node = str(max(1, torch.cuda.device_count()))
    meets_elsewhere = given & {
        "--rdzv-endpoint",
        "--rdzv-backend",
        "--master-addr",
        "--master-port",
    }
    if (
        args.nnodes in ("1", "1:1")
        and not meets_elsewhere
        and "PET_RDZV_ENDPOINT" not in os.environ
    ):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())


@contextmanager
def _shared_cores(num_processes: str) -> Iterator[None]:
    """Each process gets its share of the cores, unless the user has said otherwise."""
    if "OMP_NUM_THREADS" in os.environ or not num_processes.isdigit():
        yield
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // int(num_processes)))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def _run(args: argparse.Namespace, command: Command) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    config, entrypoint, arguments = config_from_args(args)
    if not args.no_python and isinstance(entrypoint, str):
        module = ["-m"] if args.module else []
        worker = ["-u", "-m", "drivetrain.launch.worker"]
        arguments = [*worker, *module, command.script, *command.script_args]
    # What went wrong is said once, at the end; the agent would say it several times over.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        failures = [_rank_failure(rank, each) for rank, each in error.failures.items()]
        sys.stdout.flush()
        sys.stderr.write("\n" + verdict(failures, socket.gethostname()) + "\n")
        return root_cause(failures).process_exit_code
    except SignalException as error:
        sys.stderr.write(f"\nstopped by {error.sigval.name}; all ranks were ended\n")
        return 128 + int(error.sigval)
    return 0


def _rank_failure(rank: int, failure: ProcessFailure) -> RankFailure:
    """Torch's record of a failed process in our words; without an error file it says nothing."""
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return RankFailure(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        error=str(extra.get("py_callstack", "")),
        at_s=float(extra.get("at_s", failure.timestamp)),
    )
