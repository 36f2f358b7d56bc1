"""A run's directory and recorder, opened by all ranks together."""

from __future__ import annotations

import platform
import socket
import time
from pathlib import Path
from typing import Any

import torch

from drivetrain._version import __version__
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import make_sink
from drivetrain.train.assemble import Assembly


def open_directory(assembly: Assembly) -> RunDirectory:
    """Rank 0 makes it and writes down how the run starts; everyone uses it. A collective call."""
    world, config = assembly.world, assembly.config
    path = ""
    if world.is_main:
        directory = RunDirectory.create(config.output_dir, config.name)
        directory.run_yaml.write_text(assembly.resolved.to_yaml())
        directory.begin_attempt(_facts(assembly))
        path = str(directory.path)
    return RunDirectory(Path(world.agree(path)))


def open_recorder(assembly: Assembly, directory: RunDirectory) -> Recorder:
    """This rank's event file; the sinks hang on rank 0's."""
    names = assembly.config.record.sinks if assembly.world.is_main else ()
    sinks = [make_sink(name, directory) for name in names]
    return Recorder(directory.events(assembly.world.rank), sinks)


def _facts(assembly: Assembly) -> dict[str, Any]:
    identity = assembly.world.identity
    return {
        "started_s": time.time(),
        "host": socket.gethostname(),
        "environment": identity.environment,
        "world_size": identity.world_size,
        "layout": str(assembly.world.layout),
        "device": str(assembly.world.device),
        "drivetrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
