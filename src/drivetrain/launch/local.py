"""Ranks on this machine (or this node of several), started and watched by a supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.command import Command, add_our_flags, parse_command, parse_flags
from drivetrain.launch.early import (
    budgets_of,
    command_of_ranks,
    nodes_of_step,
    too_many_for_memory,
    variables_of_ranks,
)
from drivetrain.launch.flag_values import RULE_OF_RANKS, environment_problems
from drivetrain.launch.job import missing_script

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

    from drivetrain.supervise.processes.head_start import HeadStart
    from drivetrain.supervise.processes.node import WarmProcess
    from drivetrain.supervise.settings import Settings


_SAYS_WHERE_TO_MEET = {"--nnodes", "--standalone", "--rdzv-endpoint", "--rdzv-backend"}


def launch(
    argv: Sequence[str],
    warm: WarmProcess | None = None,
    head_start: HeadStart | None = None,
) -> int:
    """Start the ranks of a command line and wait; return the exit code for the shell."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    add_our_flags(parser)
    command = parse_command(argv, parser)
    given = {word.partition("=")[0] for word in command.launcher_args}
    if problems := environment_problems(given):
        raise ConfigError(problems)
    args = parse_flags(parser, command.torchrun_args)
    if args.module and not command.is_module:  # PET_MODULE=1
        command = replace(command, launcher_args=("--module", *command.launcher_args))
    _check_script(command, args)
    _check_live(args)
    _fill_in(args, given)
    _check_ranks(args)
    with _environment(args, given):
        return _supervise(args, command, given, warm, head_start)


def _check_script(command: Command, args: argparse.Namespace) -> None:
    if args.module or args.no_python:
        return
    if problems := missing_script(command.script):
        raise ConfigError(problems)


def _check_live(args: argparse.Namespace) -> None:
    if args.live and args.run_dir is None:
        remedy = "add --run-dir DIR, on storage that all nodes share"
        raise ConfigError(
            [Problem("--live", "replicas must know the run's directory", remedy, has_value=False)]
        )


def _check_ranks(args: argparse.Namespace) -> None:
    """Refuse more ranks than fit, and what only torch knows: =gpu on a node without GPUs."""
    from torch.distributed.run import determine_local_world_size

    try:
        num_ranks = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        is_known = "is not available" in str(error)
        rule = "this node has no such device" if is_known else RULE_OF_RANKS
        remedy = "--nproc-per-node 2"
        raise ConfigError(
            [Problem("--nproc-per-node", rule, remedy, args.nproc_per_node)]
        ) from None
    if problem := too_many_for_memory(num_ranks, shares_imports=args.warm_start):
        raise ConfigError([problem])
    fewest, _, most = args.nnodes.partition(":")
    if most and int(most) < int(fewest):
        rule = "the maximum is less than the minimum"
        raise ConfigError([Problem("--nnodes", rule, f"--nnodes {most}:{fewest}", args.nnodes)])


def _fill_in(args: argparse.Namespace, given: set[str]) -> None:
    """Fill in what torchrun leaves to the user: the number of processes, and Slurm's nodes."""
    from drivetrain.parallel.accelerator import num_devices

    if "--nproc-per-node" not in given and "PET_NPROC_PER_NODE" not in os.environ:
        args.nproc_per_node = str(max(1, num_devices()))
    if args.run_dir is not None:
        args.run_dir = str(Path(args.run_dir).absolute())
    if not given & _SAYS_WHERE_TO_MEET and "PET_NNODES" not in os.environ:
        step = nodes_of_step(os.environ, args.run_dir)
        if step is not None:
            args.nnodes, args.rdzv_id = str(step.num_nodes), step.life


@contextmanager
def _environment(args: argparse.Namespace, given: set[str]) -> Iterator[None]:
    """Set what all ranks of this node inherit; restore the caller's environment afterwards."""
    num_ranks = int(args.nproc_per_node) if args.nproc_per_node.isdigit() else None
    wanted = variables_of_ranks(args.run_dir, num_ranks, args.accept_change)
    if not _meets_in_folder(args, given):
        # torch's store outlives its attempt, and the next attempt would connect to it
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _supervise(
    args: argparse.Namespace,
    command: Command,
    given: set[str],
    warm: WarmProcess | None,
    head_start: HeadStart | None,
) -> int:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import Std

    from drivetrain.supervise.agent import Supervisor
    from drivetrain.supervise.starting import Logs

    config = _config_of(args)
    # the supervisor reports an error once; torch would log it several times
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="drivetrain-meet-") as scratch:
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=command.script,
            rdzv_handler=_meeting_place(args, given, config, Path(scratch), head_start),
            max_restarts=config.max_restarts,
            local_addr=config.local_addr,
        )
        logs = Logs(args.log_dir, Std.from_str(args.redirects), Std.from_str(args.tee))
        settings = _settings(args, command, given)
        supervisor = Supervisor(spec, settings, logs, warm, head_start)
        supervisor.run()
        _explain_usage_error(command, supervisor.exit_code)
        return supervisor.exit_code


def _explain_usage_error(command: Command, exit_code: int) -> None:
    """Say so if the script's own parser has probably rejected the config's arguments."""
    if exit_code != ConfigError.exit_code or command.is_module:
        return
    from drivetrain.config.script_parser import settings_problem  # loads pydantic

    problem = settings_problem(command.script, command.script_args)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        sys.stderr.flush()


def _config_of(args: argparse.Namespace) -> LaunchConfig:
    from torch.distributed.run import config_from_args

    try:
        return config_from_args(args)[0]
    except (ValueError, OSError) as error:  # --logs-specs, --log-dir, --no-python with -m
        remedy = "`torchrun --help` lists what they accept"
        raise ConfigError(
            [Problem("torchrun's flags", str(error), remedy, has_value=False)]
        ) from error


def _meeting_place(
    args: argparse.Namespace,
    given: set[str],
    config: LaunchConfig,
    scratch: Path,
    head_start: HeadStart | None,
) -> RendezvousHandler:
    """Return the rendezvous: in the run directory, for one node only, or as torchrun would."""
    from drivetrain.supervise.rendezvous.handler import join_in_folder

    if not _meets_in_folder(args, given):
        return _as_torchrun(config)
    if head_start is not None:
        folder = scratch / head_start.run_id
        return join_in_folder(folder, (1, 1), "127.0.0.1", {}, head_start.listener)
    if _is_alone(args):
        return join_in_folder(scratch / uuid.uuid4().hex, (1, 1), "127.0.0.1", {})
    folder = Path(args.run_dir) / "rendezvous" / config.run_id
    nodes = (config.min_nodes, config.max_nodes)
    return join_in_folder(folder, nodes, _own_address(args), config.rdzv_configs)


def _is_alone(args: argparse.Namespace) -> bool:
    return args.standalone or args.nnodes in ("1", "1:1")


def _meets_in_folder(args: argparse.Namespace, given: set[str]) -> bool:
    elsewhere = given & {"--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--master-port"}
    if elsewhere or "PET_RDZV_ENDPOINT" in os.environ:
        return False
    return _is_alone(args) or args.run_dir is not None


def _as_torchrun(config: LaunchConfig) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    try:
        return registry.get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
    except ValueError as error:  # an unknown backend, or a setting of it
        remedy = "correct --rdzv-backend, --rdzv-endpoint or --rdzv-conf"
        raise ConfigError(
            [Problem("--rdzv-backend", str(error), remedy, config.rdzv_backend)]
        ) from error


def _own_address(args: argparse.Namespace) -> str:
    """Return the address at which the other nodes reach this one."""
    return args.local_addr or socket.gethostname()


def _settings(args: argparse.Namespace, command: Command, given: set[str]) -> Settings:
    from drivetrain.supervise.settings import Settings
    from drivetrain.supervise.stall import Patience

    return Settings(
        command=command_of_ranks(command),
        is_python=not args.no_python,
        budgets=budgets_of(args, given),
        patience=Patience(args.stall_timeout, args.slow_timeout),
        grace_s=args.grace_period,
        spares=args.spares,
        warm_start=args.warm_start,
        live=args.live,
    )
