"""Whether the ranks of a command line can begin before torch is imported; if so, they do.

Only where nothing but the command line decides what they are: on one machine, with flags that say
how many, or how long to wait. Whatever asks for more goes the usual way, where torchrun's own
parser reads it and says what is wrong with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.errors import ConfigError
from drivetrain.launch.allocation import nodes_of_step
from drivetrain.launch.command import Command, add_our_flags, add_torchruns_flags, parse_command
from drivetrain.launch.inherited import budgets_of, command_of_ranks, variables_of_ranks
from drivetrain.record.session import COMMAND_S, NODE_SESSION
from drivetrain.supervise.processes.head_start import HeadStart

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
"""Without any of these there is no GPU that torch itself could count."""
_ENTRY_POINTS = "*-info/entry_points.txt"


def start_early(words: Sequence[str]) -> HeadStart | None:
    """The ranks, begun; None when the supervisor must start them."""
    if not {NODE_SESSION, COMMAND_S} <= os.environ.keys() or _is_set_by_torchruns_variables():
        return None
    try:
        command, args, given = parsed(words)
        num_ranks = _num_ranks(args)
        if not given <= _UNDERSTOOD or num_ranks is None or not is_alone(args, given):
            return None
        num_restarts = budgets_of(args, given).failures
    except (ConfigError, argparse.ArgumentError, ValueError):
        return None  # said by those who read it again
    words_of_rank = command_of_ranks(command)
    if words_of_rank[0] != "-m" and not Path(command.script).is_file():
        return None
    os.environ.update(variables_of_ranks(args.run_dir, num_ranks, args.accept_change))
    session = Path(os.environ.pop(NODE_SESSION))  # the supervisor's own, not its ranks'
    return HeadStart(words_of_rank, session, num_ranks, num_restarts)


def parsed(words: Sequence[str]) -> tuple[Command, argparse.Namespace, set[str]]:
    """The command, its flags and which of them were given; without torch, and so unchecked."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_torchruns_flags(parser)
    add_our_flags(parser)
    command = parse_command(words, parser)
    given = {word.partition("=")[0] for word in command.launcher_args}
    return command, parser.parse_args(list(command.launcher_args)), given


def _is_set_by_torchruns_variables() -> bool:
    return any(name.startswith("PET_") for name in os.environ)


def _num_ranks(args: argparse.Namespace) -> int | None:
    """As many as were asked for, or one where there is no GPU."""
    if args.nproc_per_node is None:
        return None if _may_have_devices() else 1
    return int(args.nproc_per_node) or None if args.nproc_per_node.isdigit() else None


def _may_have_devices() -> bool:
    return any(Path(path).exists() for path in _DRIVERS) or _has_vendors_package()


def _has_vendors_package() -> bool:
    """One that brings torch a device of its own. `importlib.metadata` takes seven times as long."""
    files = (file for folder in sys.path for file in Path(folder).glob(_ENTRY_POINTS))
    return any("[torch.backends]" in file.read_text(encoding="utf-8") for file in files)


def is_alone(args: argparse.Namespace, given: set[str]) -> bool:
    """Whether this node is all of the run."""
    if given & {"--nnodes", "--standalone"}:
        return args.standalone or args.nnodes in ("1", "1:1")
    return nodes_of_step(os.environ, args.run_dir) is None
