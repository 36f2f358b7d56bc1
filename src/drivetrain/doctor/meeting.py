"""Members of a job meet in a folder: `srun drivetrain doctor --meet DIR`.

Each puts down its name; the first by name becomes the desk, the others answer it until it is done.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.doctor.channels import Channel, Folder, Here, answer_in

_COME_WITHIN_S = 120.0
_POLL_S = 0.05
_NUM_MEMBERS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "PET_NNODES", "DRIVETRAIN_NUM_NODES")


def num_members(given: int | None, variables: Mapping[str, str] = os.environ) -> int:
    """As the scheduler says, unless the user does."""
    if given is not None:
        return given
    for name in _NUM_MEMBERS:
        if variables.get(name, "").isdigit():
            return int(variables[name])
    problem = Problem("--members", "how many hosts will meet?", "--members N", has_value=False)
    raise ConfigError([problem])


@contextmanager
def meeting(
    folder: Path, count: int, variables: Mapping[str, str] = os.environ
) -> Iterator[list[Channel] | None]:
    """Channels to all members for the one that is first; None for the others, once dismissed."""
    # a job's second meeting does not find the first one's leavings
    words = [variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    place = folder.absolute() / "-".join(["doctor", *filter(None, words)])
    own = socket.gethostname()
    (place / own).mkdir(parents=True, exist_ok=True)
    names = _gathered(place, count)
    if names[0] != own:
        answer_in(place / own, _COME_WITHIN_S)
        shutil.rmtree(place / own, ignore_errors=True)
        yield None
        return
    channels: list[Channel] = [Here(own), *(Folder(name, place / name) for name in names[1:])]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()
        _clear_up(place, own)


def _clear_up(place: Path, own: str) -> None:
    """When the others have left; one that is lost leaves its folder behind, which tells of it."""
    shutil.rmtree(place / own, ignore_errors=True)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and any(place.iterdir()):
        time.sleep(_POLL_S)
    with suppress(OSError):
        place.rmdir()


def _gathered(folder: Path, count: int) -> list[str]:
    deadline = time.monotonic() + _COME_WITHIN_S
    names: list[str] = []
    while time.monotonic() < deadline:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if len(names) >= count:
            return names
        time.sleep(_POLL_S)
    remedy = "see that all of them have this folder, and start them together; or --members N"
    rule = f"{len(names)} of {count} hosts came ({', '.join(names)})"
    raise ConfigError([Problem("--meet", rule, remedy, str(folder))])
