"""A run's directory and recorder, opened by all ranks together."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.checkpointer import versions
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import (
    beginnings,
    next_run_directory,
    remember_attempt,
    remember_directory,
)
from drivetrain.record.sinks import is_per_node, make_sink
from drivetrain.train.assemble import Assembly


def open_directory(assembly: Assembly) -> RunDirectory:
    """Rank 0 makes it, or finds the one of an earlier attempt; everyone uses it. Collective."""
    world, config = assembly.world, assembly.config
    settled, number = next_run_directory()
    path = ""
    if world.is_main or world.mesh is None:  # live replicas settle it each for itself
        made = settled or RunDirectory.create(config.output_dir, config.name).path
        path = str(RunDirectory.at(made).path)
    directory = RunDirectory(Path(world.agree(path)))
    if world.identity.local_rank == 0:
        remember_directory(number, directory.path)
    return directory


def begin_attempt(
    assembly: Assembly, directory: RunDirectory, number: int, resumed_step: int
) -> None:
    """Rank 0 writes down what this life of the run starts with."""
    if assembly.world.identity.local_rank == 0:
        remember_attempt(number)
    if assembly.world.is_main:
        directory.write_run_yaml(assembly.resolved.to_yaml(), number)
        directory.begin_attempt(number, {**_facts(assembly), "resumed_step": resumed_step})


def open_recorder(assembly: Assembly, directory: RunDirectory, attempt: int) -> Recorder:
    """This rank's event file; the sinks hang on rank 0's, and some on each node's first."""
    identity = assembly.world.identity
    names: tuple[str, ...] = tuple(assembly.config.record.sinks)
    if not assembly.world.is_main:
        names = tuple(name for name in names if identity.local_rank == 0 and is_per_node(name))
    sinks = [make_sink(name, directory) for name in names]
    recorder = Recorder(directory.events(identity.rank), sinks, attempt)
    recorder.watch_system(assembly.config.record.system_every_s)
    return recorder


def _facts(assembly: Assembly) -> dict[str, Any]:
    identity = assembly.world.identity
    return {
        **beginnings(),
        "started_s": time.time(),
        "host": socket.gethostname(),
        "environment": identity.environment,
        "world_size": identity.world_size,
        "total_steps": assembly.total_steps,
        "layout": str(assembly.world.layout),
        "device": str(assembly.world.device),
        "device_name": assembly.world.accelerator.name,
        **versions(),
    }
