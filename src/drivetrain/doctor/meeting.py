"""Members of a job meet in a folder: `srun drivetrain doctor --meet DIR`.

Each puts down its name; the first by name is the client, the others answer it until it is done.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.core.bounded import parse_json, read_text
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.files import write_whole
from drivetrain.doctor.channels import Channel, Folder, Here, Limits, answer_in

_COME_WITHIN_S = 120.0
_POLL_S = 0.05
_FOLDER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252})\.[0-9a-f]{16}")
_SEEN = "seen"
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
    folder: Path,
    count: int,
    limits: Limits,
    variables: Mapping[str, str] = os.environ,
    host: str | None = None,
) -> Iterator[list[Channel] | None]:
    """Channels to all members for the one that is first; None for the others, once dismissed."""
    # a job's second meeting does not find the first one's leavings
    words = [variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    place = folder.absolute() / "-".join(["doctor", str(os.getuid()), *filter(None, words)])
    _make_place(place)
    own = place / f"{host or socket.gethostname()}.{secrets.token_hex(8)}"
    own.mkdir(mode=0o700)
    try:
        names = _gathered(place, own.name, count)
        if names[0] != own.name:
            answer_in(own, _COME_WITHIN_S, limits)
            yield None
            return
        others = (Folder(host_of(name) or name, place / name) for name in names[1:])
        channels: list[Channel] = [Here(host_of(own.name) or own.name), *others]
        try:
            yield channels
        finally:
            for channel in channels:
                channel.close()
    finally:
        _clear_up(place, own)


def host_of(name: str) -> str | None:
    """The host whose folder has this name; None for what no member has made."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else match[1]


def _make_place(place: Path) -> None:
    """Where nobody else can write: who could would be a host, and the one that asks."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    facts = place.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o022 or not os.access(place, os.W_OK):
        rule = f"{place.name} in it is not a folder that only you can write"
        remedy = "remove it, or give a folder of your own"
        raise ConfigError([Problem("--meet", rule, remedy, str(place.parent))])


def _clear_up(place: Path, own: Path) -> None:
    """The last one takes the place away; one that is lost leaves its folder, which tells of it."""
    shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):
        place.rmdir()


def _gathered(place: Path, own: str, count: int) -> list[str]:
    """Folders of those who are here now, each named after its host.

    Everybody writes down whose folders it sees. A folder's name holds a number drawn for this
    meeting, so who has written down mine is here: what an earlier meeting left cannot have.
    """
    deadline = time.monotonic() + _COME_WITHIN_S
    here, said = [own], [""]
    while time.monotonic() < deadline:
        seen = _members(place)
        if seen != said:
            write_whole(place / own / _SEEN, json.dumps(seen))
            said = seen
        here = [name for name in seen if name == own or own in _seen_by(place / name)]
        if len(here) >= count:
            return here
        time.sleep(_POLL_S)
    hosts = ", ".join(host_of(name) or name for name in here)
    remedy = "see that all of them have this folder, and start them together; or --members N"
    rule = f"{len(here)} of {count} hosts came ({hosts})"
    raise ConfigError([Problem("--meet", rule, remedy, str(place))])


def _members(place: Path) -> list[str]:
    """Folders that members may have made, in order; links are not followed."""
    with os.scandir(place) as entries:
        found = [e.name for e in entries if host_of(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(found)


def _seen_by(folder: Path) -> list[str]:
    try:
        seen = parse_json(read_text(folder / _SEEN))
    except (OSError, ValueError, DamagedRun):  # not yet
        return []
    return seen if isinstance(seen, list) else []
