"""The rendezvous directory: the list of nodes, in one small file that is changed under a lock."""

from __future__ import annotations

import json
import os
import random
import string
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
from drivetrain.supervise.rendezvous.signs import SignsOfLife

# The list of nodes as text: JSON, checked when it is read back.
#
# torch stores it as a pickle, and reading a pickle runs the code in it, while others may be able to
# write to this directory.
#
# Every node reads it to join, one after the other, so each node is in it once.

_IN_ADDRESSES = frozenset(string.ascii_letters + string.digits + "._:%-[]")
"""Host names and addresses are also used as file names."""
_LONGEST_ADDRESS = 255


def nodes_to_json(state: _RendezvousState) -> bytes:
    signs = state.last_heartbeats
    listed = (*state.participants, *state.wait_list, *state.redundancy_list)
    unlisted = signs.keys() - set(listed)
    document = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": _iso(state.deadline),
        "ranks": list(state.participants.values()),
        "participants": [_row(node, signs) for node in state.participants],
        "wait_list": [_row(node, signs) for node in state.wait_list],
        "redundancy_list": [_row(node, signs) for node in state.redundancy_list],
        "unlisted": [_row(node, signs) for node in unlisted],
    }
    return json.dumps(document).encode()


def _row(node: _NodeDesc, signs: dict[_NodeDesc, datetime]) -> list[str | int | None]:
    return [node.addr, node.pid, node.local_id, _iso(signs.get(node))]


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def nodes_from_json(data: bytes) -> _RendezvousState:
    """Parse what `nodes_to_json` wrote; ValueError if it did not write this."""
    try:
        return _state(parse_json(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or invalid ({error})") from None


def _state(document: dict[str, Any]) -> _RendezvousState:
    state = _RendezvousState()
    state.round = int(document["round"])
    state.complete = bool(document["complete"])
    state.closed = bool(document["closed"])
    state.deadline = None if document["deadline"] is None else _moment(document["deadline"])

    def nodes(name: str) -> list[_NodeDesc]:
        found = []
        for address, pid, local_id, sign in document[name]:
            node = _node(address, pid, local_id)
            if sign is not None:
                state.last_heartbeats[node] = _moment(sign)
            found.append(node)
        return found

    ranks = [int(rank) for rank in document["ranks"]]
    state.participants = dict(zip(nodes("participants"), ranks, strict=True))
    state.wait_list = set(nodes("wait_list"))
    state.redundancy_list = set(nodes("redundancy_list"))
    nodes("unlisted")
    return state


def _node(address: str, pid: int, local_id: int) -> _NodeDesc:
    is_possible = 1 <= len(address) <= _LONGEST_ADDRESS and _IN_ADDRESSES.issuperset(address)
    if not is_possible or address.startswith("."):
        raise ValueError(f"{address!r} is not a host name")
    return _NodeDesc(address, int(pid), int(local_id))


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return moment


FINISHED = "finished"
_HEAD = struct.Struct("<QQ")
_MOST_BYTES = 64 << 20
"""The largest list that is read: a quarter of a million nodes."""
_TRIES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 2.0


@dataclass(frozen=True)
class Head:
    """The header of the list file."""

    version: int
    """Counts all changes of the list."""
    turn: int
    """Counts the changes that nodes wait for: another round, a round that is complete."""


class RendezvousFolder:
    """A rendezvous directory on storage that all nodes share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._list = path / "state"
        self._lock = path / "lock"
        self.signs = SignsOfLife(path)
        self._check_locks()

    def head(self) -> Head | None:
        """Read the header; None if there is no list."""
        found = self._bytes(_HEAD.size)
        try:
            return None if found is None else Head(*_HEAD.unpack(found))
        except struct.error as error:
            raise self._damaged(error) from None

    def read(self) -> tuple[_RendezvousState, Head] | None:
        """Read the list; writers rename a new file, so readers need no lock."""
        found = self._bytes()
        if found is None:
            return None
        try:
            state = nodes_from_json(found[_HEAD.size :])
            return state, Head(*_HEAD.unpack_from(found))
        except (ValueError, struct.error) as error:
            raise self._damaged(error) from None

    def nodes(self) -> list[_NodeDesc]:
        """Return the nodes that are in the list now."""
        found = self.read()
        return [] if found is None else list(found[0].last_heartbeats)

    def _damaged(self, error: Exception) -> DamagedRun:
        return DamagedRun(
            f"{self._list}: not a list of nodes; remove {self.path} and start again ({error})"
        )

    def write(self, state: _RendezvousState, head: Head) -> None:
        """Write the list; the caller must hold the lock."""
        try:
            write_whole(self._list, _HEAD.pack(head.version, head.turn) + nodes_to_json(state))
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _check_locks(self) -> None:
        """Raise EnvironmentProblem if locks do not work; another node's lock is proof enough."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try_lock(descriptor, self._lock)
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; the system frees it when its holder dies.

        A waiting node retries after a random time with exponential backoff. A blocking lock would
        wake a thousand waiting nodes together, all but one of them in vain.
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

    def forget_the_dead(self, is_dead: Callable[[_NodeDesc], bool]) -> bool:
        """Clear the list if its run is over, that is closed with no live node; True if so."""
        with self.locked():
            found = self.read()
            if found is None:
                return True
            state, _ = found
            gone = [self.signs.has_left(node) or is_dead(node) for node in state.last_heartbeats]
            if not state.closed or not all(gone):
                return False
            self._list.unlink()
            # rounds are counted from 0 again
            for old in (*self.path.glob("store-*"), self.path / FINISHED):
                old.unlink(missing_ok=True)
            self.signs.forget()
            return True

    def _bytes(self, most: int | None = None) -> bytes | None:
        for _ in range(_TRIES):
            try:
                return read_bytes(self._list, length=most, most=_MOST_BYTES)
            except FileNotFoundError:
                return None
            except OSError as error:  # shared file systems have transient errors
                problem = error
                time.sleep(0.1)
        raise RendezvousConnectionError(str(problem)) from problem
