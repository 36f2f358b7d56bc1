"""Parsing `drivetrain train` command lines that submit a run to a target.

    drivetrain train --on slurm --nodes 2 --gpus-per-node 8 --time 2:00:00 train.py --lr 0.1

This is the usual command line plus flags of the job and of the target. The flags can also come from
a file (`--launch-file launch.yaml`, with the flags' names as keys); the command line overrides it.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core import set_once
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.flags import AFTER_SCRIPT, ALIASES, last_value
from drivetrain.launch.command import (
    Command,
    add_our_flags,
    add_torchruns_flags,
    parse_command,
    parse_flags,
)
from drivetrain.launch.job import Job, seconds_of
from drivetrain.launch.ownership import split_secrets
from drivetrain.launch.submission import find
from drivetrain.launch.target import (
    TARGETS,
    FillsIn,
    Target,
    add_options,
    target_type,
    with_options,
)

_ASKS_FOR_A_TARGET = ("--on", "--hosts", "--launch-file")
# With a scheduler, --num-gpus requests GPUs; without one, it means that many processes.
_ALIASES = {**ALIASES, "--num-gpus": "--gpus-per-node"}
del _ALIASES["--gpus-per-node"]
_OF_THE_JOB = {"--nnodes", "--nproc-per-node", "--run-dir", "--grace-period"}


@dataclass(frozen=True)
class Request:
    """A job and its target, and whether to only print it or to wait for its end."""

    target: Target
    job: Job
    is_dry_run: bool
    waits: bool
    passed_flags: tuple[str, ...] = ()
    """Flags of the launcher that the script gets."""


def asked_target(argv: Sequence[str]) -> str | None:
    """Return the target that a command line names, if any, even if the rest is invalid."""
    if on := last_value(argv, "--on"):
        return on
    if last_value(argv, "--backend") == "ray":
        return "ray"
    return "hosts" if last_value(argv, "--hosts") else None


def read_request(argv: Sequence[str]) -> Request | None:
    """Parse a command line into a request; None if it names no target."""
    is_for_ray = last_value(argv, "--backend") == "ray"
    if not is_for_ray and not any(w.partition("=")[0] in _ASKS_FOR_A_TARGET for w in argv):
        return None
    argv = [*_from_file(last_value(argv, "--launch-file")), *argv]
    on = last_value(argv, "--on") or ("ray" if is_for_ray else None)
    name = on or "hosts"
    parser, of_target = _parser(target_type(name) if name in TARGETS.names else None)
    # after the script, target flags count only with --on: --hosts may be the script's own flag
    command = parse_command(argv, parser, _ALIASES, AFTER_SCRIPT | (of_target if on else set()))
    given = {word.partition("=")[0] for word in command.launcher_args}
    if not given & {"--on", "--hosts"}:
        return None
    kind = target_type(name)
    args = parse_flags(parser, command.launcher_args)
    target, job = with_options(kind, vars(args)), _job(args, command, of_target)
    if isinstance(target, FillsIn):
        job = target.fill_in(job, given)
    return Request(target, job, args.dry_run, args.wait, command.passed_flags)


def read_command(argv: Sequence[str]) -> Command:
    """Parse a command line for this machine, without asking torch for its flags."""
    return parse_command(argv, _parser(None)[0])


def _parser(kind: type[Any] | None) -> tuple[argparse.ArgumentParser, set[str]]:
    """Create a parser with all flags; also return the flags of the job and the target."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_torchruns_flags(parser)
    add_our_flags(parser)
    before = set(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list
    parser.add_argument("--on")
    parser.add_argument("--launch-file")
    parser.add_argument("--job-name")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--time")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--wait", action="store_true")
    if kind is not None:
        add_options(parser, kind)
    return parser, set(parser._option_string_actions) - before  # noqa: SLF001


def _job(args: argparse.Namespace, command: Command, of_target: set[str]) -> Job:
    num_nodes, max_nodes = _nodes(args.nnodes or "1")
    stem = command.script.rpartition(".")[2] if command.is_module else Path(command.script).stem
    name = args.job_name or stem
    own = _OF_THE_JOB | of_target
    handed_on = [word for word in command.launcher_args if word.partition("=")[0] not in own]
    environment, secrets = split_secrets([_variable(text) for text in args.env])
    run_dir = args.run_dir or f"runs/{name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    return Job(
        name=name,
        script=command.script,
        script_args=command.script_args,
        flags=tuple(handed_on),
        run_dir=str(Path(run_dir).absolute()),
        working_dir=str(Path.cwd()),
        num_nodes=num_nodes,
        max_nodes=max_nodes,
        processes_per_node=_processes(args.nproc_per_node) or max(1, args.gpus_per_node),
        gpus_per_node=args.gpus_per_node,
        time_limit_s=None if args.time is None else seconds_of(args.time),
        grace_s=args.grace_period,
        environment=environment,
        secrets=secrets,
        owner=_owner(run_dir),
    )


def _owner(run_dir: str) -> str:
    """Return who first submitted the run: user@host."""
    before = find(run_dir)
    if before is not None:
        return before.job.owner
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    return int(fewest), int(most or fewest)


def _processes(text: str | None) -> int:
    """Return a number of processes: kinds of device (gpu) are known on the nodes only."""
    if text is None:
        return 0
    if not text.isdigit():
        rule = "must be a whole number, at least 1, for a target"
        raise ConfigError([Problem("--nproc-per-node", rule, "--nproc-per-node 2", text)])
    return int(text)


def _variable(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, or NAME with its value in this environment."""
    name, has_value, value = text.partition("=")
    if not has_value and name not in os.environ:
        rule = "this variable is not set here"
        raise ConfigError([Problem("--env", rule, f"--env {name}=VALUE", name)])
    return name, value if has_value else os.environ[name]


def _from_file(path: str | None) -> Iterator[str]:
    """Yield a file's keys as flags: `nodes: 2` is --nodes=2, a list repeats the flag.

    All values are read as text: in YAML, `on` is true and 2:00:00 is 7200.
    """
    if path is None:
        return
    try:
        content = yaml.load(Path(path).read_text(), set_once.TextLoader) or {}  # noqa: S506 - it makes strings only
    except set_once.SetTwice as error:
        raise ConfigError([Problem("--launch-file", str(error), set_once.REMEDY, path)]) from None
    except (OSError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [Problem("--launch-file", reason, "give a YAML file of flags", path)]
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(
            [
                Problem(
                    "--launch-file",
                    "must be a mapping of keys to values",
                    "for example on: slurm",
                    path,
                )
            ]
        )
    for key, value in content.items():
        flag = f"--{str(key).replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            if item == "true":
                yield flag
            elif item not in ("false", "null", ""):
                yield f"{flag}={item}"
