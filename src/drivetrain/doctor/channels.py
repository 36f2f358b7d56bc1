"""How the client talks to an agent: through a pipe (this machine, ssh), or files in a directory.

Neither needs the network that is being examined: ssh's port is open where a run's may not be, and
under any scheduler the hosts share a directory.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.bounded import parse_json, read_text
from drivetrain.core.errors import ConfigError, DamagedRun, EnvironmentProblem, Problem
from drivetrain.core.files import write_whole
from drivetrain.doctor.agent import Agent, answer

_PATIENCE_S = 60.0
_POLL_S = 0.02
_MEMBERS_CALLS = frozenset(
    {"facts", "clock", "listen", "close_ports", "resolve", "dial", "measure", "sees"}
)
"""Calls that a member accepts; only the leader of a meeting creates and deletes files."""
_AGENT_MODULE = "drivetrain.doctor.agent"
AGENT = (sys.executable, "-m", _AGENT_MODULE)


class AgentLost(EnvironmentProblem):
    """A host could not be reached; the others are still examined."""


class Channel(Protocol):
    """One agent, seen from the client."""

    name: str

    def ask(self, call: str, **arguments: Any) -> Any:
        """Send a request and return the reply; raise AgentLost, naming the host, on failure."""
        ...

    def close(self) -> None:
        """Release the agent."""
        ...


class Here:
    """An agent in this process, for the client's own host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._agent = Agent()

    def ask(self, call: str, **arguments: Any) -> Any:
        return _unwrapped(self.name, answer(self._agent, {"call": call, "with": arguments}))

    def close(self) -> None:
        self._agent.close_ports()


class Pipe:
    """An agent behind the standard input and output of a process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process

    def ask(self, call: str, **arguments: Any) -> Any:
        """Send one line and wait for one line."""
        assert self._process.stdin is not None  # noqa: S101 - it was started with pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(json.dumps({"call": call, "with": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None
        ready = select.select([self._process.stdout], [], [], _PATIENCE_S)[0]
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise self._lost()
        return _unwrapped(self.name, json.loads(line))

    def _lost(self) -> AgentLost:
        if self._process.poll() is None:
            self._process.kill()
        _, said = self._process.communicate()
        last = (said or "").strip().splitlines()[-1:] or ["no output"]
        return _unreachable(self.name, last[0])

    def close(self) -> None:
        """Close the agent's standard input, which ends it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def over_ssh(host: str, ssh: Sequence[str], python: str) -> Pipe:
    """Start an agent on `host`, with the same Python and PYTHONPATH as here."""
    path = os.environ.get("PYTHONPATH")
    argv = [*(["env", f"PYTHONPATH={path}"] if path else []), python, "-m", _AGENT_MODULE]
    # ssh passes one line to the remote shell
    command = [*ssh, host, shlex.join(argv)]
    pipe = subprocess.PIPE
    return Pipe(host, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))


class Folder:
    """An agent that reads its requests from files in a directory."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._num_asked = 0

    def ask(self, call: str, **arguments: Any) -> Any:
        """Write a request file and wait for the reply file."""
        request = {"call": call, "with": arguments}
        write_whole(self._folder / f"ask-{self._num_asked}", json.dumps(request))
        reply = self._folder / f"answer-{self._num_asked}"
        self._num_asked += 1
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if reply.exists():
                return _unwrapped(self.name, _read(reply))
            time.sleep(_POLL_S)
        raise _unreachable(self.name, f"no answer in {_PATIENCE_S:.0f} s")

    def close(self) -> None:
        """Send a final request that needs no reply."""
        write_whole(self._folder / f"ask-{self._num_asked}", json.dumps({"call": "bye"}))


@dataclass(frozen=True)
class ChannelLimits:
    """What a member does on request: no more than its own command line names."""

    ports: tuple[int, ...] = ()
    places: tuple[str, ...] = ()

    def refuses(self, call: Any, arguments: Mapping[str, Any]) -> bool:
        """Whether to refuse a request: only this member's own ports and places are allowed."""
        if call not in _MEMBERS_CALLS:
            return True
        ports = set(arguments.get("ports") or ())
        places = set(arguments.get("places") or ())
        return not (ports <= {0, *self.ports} and places <= set(self.places))


def answer_in(folder: Path, patience_s: float, limits: ChannelLimits) -> None:
    """Serve a Folder until dismissed, or until no request has come for `patience_s`."""
    agent = Agent()
    number, deadline = 0, time.monotonic() + patience_s
    while time.monotonic() < deadline:
        path = folder / f"ask-{number}"
        if not path.exists():
            time.sleep(_POLL_S)
            continue
        request = _read(path)
        if request.get("call") == "bye":
            break
        write_whole(folder / f"answer-{number}", json.dumps(_answer(agent, request, limits)))
        number, deadline = number + 1, time.monotonic() + patience_s
    agent.close_ports()


def _answer(agent: Agent, request: Mapping[str, Any], limits: ChannelLimits) -> dict[str, Any]:
    if "error" in request:
        return dict(request)
    call, arguments = request.get("call"), request.get("with")
    try:
        if not isinstance(arguments, dict) or limits.refuses(call, arguments):
            return {"error": f"a member does not accept call {call!r} with {arguments!r}"}
    except TypeError:  # unhashable arguments cannot be allowed ones
        return {"error": f"a member does not accept call {call!r}"}
    return answer(agent, request)


def _read(path: Path) -> dict[str, Any]:
    """Read another host's message; an invalid one becomes an error reply."""
    try:
        message = parse_json(read_text(path))
    except (OSError, ValueError, DamagedRun) as error:
        return {"error": f"the message cannot be read ({error})"}
    return message if isinstance(message, dict) else {"error": "not a valid message"}


def _unwrapped(name: str, reply: dict[str, Any]) -> Any:
    if "answer" not in reply:
        said = str(reply.get("error") or "no answer")
        raise AgentLost([Problem(f"doctor on {name}", said, "check that host", has_value=False)])
    return reply["answer"]


def _unreachable(name: str, said: str) -> AgentLost:
    remedy = (
        f"try `ssh {name} python -m drivetrain env` by hand; Drivetrain must be installed there"
    )
    return AgentLost(
        [Problem(f"doctor on {name}", f"no agent responded ({said})", remedy, has_value=False)]
    )


# Members of a job meet in a directory: `srun drivetrain doctor --meet DIR`.
#
# Each creates a folder with its name; the first by name is the client, the others serve it.

_COME_WITHIN_S = 120.0
_MEETING_POLL_S = 0.05
_FOLDER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252})\.[0-9a-f]{16}")
_SEEN = "seen"
_NUM_MEMBERS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "PET_NNODES", "DRIVETRAIN_NUM_NODES")


def num_members(given: int | None, variables: Mapping[str, str] = os.environ) -> int:
    """Return the number of hosts: the user's, or else the scheduler's."""
    if given is not None:
        return given
    for name in _NUM_MEMBERS:
        if variables.get(name, "").isdigit():
            return int(variables[name])
    problem = Problem("--members", "number of hosts unknown", "give --members N", has_value=False)
    raise ConfigError([problem])


@contextmanager
def meeting(
    folder: Path,
    count: int,
    limits: ChannelLimits,
    variables: Mapping[str, str] = os.environ,
    host: str | None = None,
) -> Iterator[list[Channel] | None]:
    """Yield channels to all members on the first one; on the others None, once dismissed."""
    # a job's second meeting must not find files of the first one
    ids = [variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    place = folder.absolute() / "-".join(["doctor", str(os.getuid()), *filter(None, ids)])
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
    """Return the host that a folder is named after; None for names that no member creates."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else match[1]


def _make_place(place: Path) -> None:
    """Create a directory that no other user can write to: writers could pose as hosts."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    facts = place.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o022 or not os.access(place, os.W_OK):
        rule = f"{place.name} in it is not a directory that only you can write to"
        remedy = "remove it, or give a directory that you own"
        raise ConfigError([Problem("--meet", rule, remedy, str(place.parent))])


def _clear_up(place: Path, own: Path) -> None:
    """Remove this member's folder; the last one removes the place. A lost member's stays."""
    shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):
        place.rmdir()


def _gathered(place: Path, own: str, count: int) -> list[str]:
    """Wait for all members; return their folders, each named after its host.

    Every member writes down which folders it sees. A folder's name contains a random number for
    this meeting, so a member that has written down mine is present; leftovers cannot have.
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
        time.sleep(_MEETING_POLL_S)
    hosts = ", ".join(host_of(name) or name for name in here)
    remedy = "check that all hosts share this directory; start them together; or give --members N"
    rule = f"{len(here)} of {count} hosts arrived ({hosts})"
    raise ConfigError([Problem("--meet", rule, remedy, str(place))])


def _members(place: Path) -> list[str]:
    """Return folders that members may have created, sorted; links are not followed."""
    with os.scandir(place) as entries:
        found = [e.name for e in entries if host_of(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(found)


def _seen_by(folder: Path) -> list[str]:
    try:
        seen = parse_json(read_text(folder / _SEEN))
    except (OSError, ValueError, DamagedRun):  # not yet
        return []
    return seen if isinstance(seen, list) else []
