"""The folder that nodes meet in: who is there, and who has given a sign of life.

The list of nodes is one small file, changed under a lock. A sign of life is a change of a file of
the node's own: thousands of nodes that live change nothing that anybody else must read.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from drivetrain.core.bounded import parse_json, read_bytes
from drivetrain.core.errors import DamagedRun
from drivetrain.core.files import write_whole
from drivetrain.core.locks import try_lock

# The list of nodes as text: JSON, checked when it is read back.
#
# torch keeps it as a pickle, and reading a pickle runs whatever is in it; the folder it lies in is
# one that others may be able to write.

_ADDRESS = re.compile(r"[A-Za-z0-9._:%\-\[\]]{1,255}")
"""Names and addresses of hosts: they become names of files, too."""


def nodes_to_json(state: _RendezvousState) -> bytes:
    deadline = state.deadline
    document = {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if deadline is None else deadline.isoformat(),
        "closed": state.closed,
        "participants": [[_said(node), rank] for node, rank in state.participants.items()],
        "wait_list": [_said(node) for node in state.wait_list],
        "redundancy_list": [_said(node) for node in state.redundancy_list],
        "last_heartbeats": [
            [_said(node), sign.isoformat()] for node, sign in state.last_heartbeats.items()
        ],
    }
    return json.dumps(document).encode()


def nodes_from_json(data: bytes) -> _RendezvousState:
    """As it was written; ValueError when it was not written by `to_json`."""
    try:
        return _state(parse_json(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"lacks what it must have ({error})") from None


def _state(document: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    deadline = document["deadline"]
    state.round = int(document["round"])
    state.complete = bool(document["complete"])
    state.deadline = None if deadline is None else _moment(deadline)
    state.closed = bool(document["closed"])
    state.participants = {_node(*node): int(rank) for node, rank in document["participants"]}
    state.wait_list = {_node(*node) for node in document["wait_list"]}
    state.redundancy_list = {_node(*node) for node in document["redundancy_list"]}
    state.last_heartbeats = {
        _node(*node): _moment(sign) for node, sign in document["last_heartbeats"]
    }
    return state


def _said(node: _NodeDesc) -> list[str | int]:
    return [node.addr, node.pid, node.local_id]


def _node(address: str, pid: int, local_id: int) -> _NodeDesc:
    if not _ADDRESS.fullmatch(address) or address.startswith("."):
        raise ValueError(f"{address!r} is no host's name")
    return _NodeDesc(address, int(pid), int(local_id))


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return moment


FINISHED = "finished"
_HEAD = struct.Struct("<QQ")
_GOODBYE = b"has left".ljust(16)
_MOST_BYTES = 64 << 20
"""Of the list: a quarter of a million nodes."""
_TRIES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 2.0


@dataclass(frozen=True)
class Head:
    """The beginning of the list."""

    version: int
    """Of the list; every change counts."""
    turn: int
    """Counts the changes that somebody waits for: another round, a round that is complete."""


class RendezvousFolder:
    """On storage that all nodes share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._list = path / "state"
        self._lock = path / "lock"
        self._lives = path / "lives"
        self._lives.mkdir(parents=True, exist_ok=True)
        self._check_locks()

    def head(self) -> Head | None:
        """None when there is no list."""
        found = self._bytes(_HEAD.size)
        try:
            return None if found is None else Head(*_HEAD.unpack(found))
        except struct.error as error:
            raise self._damaged(error) from None

    def read(self) -> tuple[_RendezvousState, Head] | None:
        """The list; writers rename, so a reader needs no lock."""
        found = self._bytes()
        if found is None:
            return None
        try:
            state = nodes_from_json(found[_HEAD.size :])
            return state, Head(*_HEAD.unpack_from(found))
        except (ValueError, struct.error) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> DamagedRun:
        return DamagedRun(
            f"{self._list}: not a list of nodes; remove {self.path} and start again ({error})"
        )

    def write(self, state: _RendezvousState, head: Head) -> None:
        """Only by whoever has the lock."""
        try:
            write_whole(self._list, _HEAD.pack(head.version, head.turn) + nodes_to_json(state))
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _check_locks(self) -> None:
        """EnvironmentProblem where there are none; somebody else's is as good as one's own."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try_lock(descriptor, self._lock)
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone; the system frees the lock when its holder dies.

        Who waits asks again after a random time, twice as long each time: of a thousand that are
        woken together, as the system would, all but one would have been woken in vain.
        """
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        pause_s = _FIRST_PAUSE_S
        try:
            while not try_lock(descriptor, self._lock):
                time.sleep(random.uniform(0, pause_s))  # noqa: S311 - no secret
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            yield
        finally:
            os.close(descriptor)

    def give_sign(self, node: _NodeDesc, sign: bytes | None = None) -> None:
        """Of life: what it says means nothing, that it has changed does.

        Always of one length and in place: there is room for it on a full disk, too.
        """
        try:
            descriptor = os.open(self._lives / str(node), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, sign or os.urandom(8).hex().encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error

    def say_goodbye(self, node: _NodeDesc) -> None:
        """The last sign: nobody need wait for another."""
        self.give_sign(node, _GOODBYE)

    def sign(self, node: _NodeDesc) -> bytes:
        """As it is now; empty when there is none."""
        try:
            return (self._lives / str(node)).read_bytes()
        except OSError:
            return b""

    def has_left(self, node: _NodeDesc) -> bool:
        """Whether a node has said so itself."""
        return self.sign(node) == _GOODBYE

    def forget_the_dead(self, is_dead: Callable[[_NodeDesc], bool]) -> bool:
        """Begin anew when the list is of a run that is over: closed, and nobody lives."""
        with self.locked():
            found = self.read()
            if found is None:
                return True
            state, _ = found
            gone = [self.has_left(node) or is_dead(node) for node in state.last_heartbeats]
            if not state.closed or not all(gone):
                return False
            self._list.unlink()
            # rounds are counted from 0 again
            for old in (
                *self.path.glob("store-*"),
                *self._lives.iterdir(),
                self.path / FINISHED,
            ):
                old.unlink(missing_ok=True)
            return True

    def _bytes(self, most: int | None = None) -> bytes | None:
        for _ in range(_TRIES):
            try:
                return read_bytes(self._list, length=most, most=_MOST_BYTES)
            except FileNotFoundError:
                return None
            except OSError as error:  # a file system that is shared has its moments
                problem = error
                time.sleep(0.1)
        raise RendezvousConnectionError(str(problem)) from problem
