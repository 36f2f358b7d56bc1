"""Signs of life (heartbeats): each node changes its own file; one node collects them for all.

If every node read every other node's file, a thousand waiting nodes would read a million files
every few seconds. So one node collects their contents in one file that the others read; a node that
finds this file unchanged since its last read collects them itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from drivetrain.core.bounded import parse_json, read_bytes
from drivetrain.core.files import write_whole
from drivetrain.core.locks import try_lock

_GOODBYE = b"has left".ljust(16)
_MOST_BYTES = 64 << 20
"""The largest collection that is read: half a million nodes."""


class SignsOfLife:
    """The nodes' signs of life, in a shared directory."""

    def __init__(self, folder: Path) -> None:
        self._lives = folder / "lives"
        self._collection = folder / "signs"
        self._lock = folder / "signs.lock"
        self._lives.mkdir(parents=True, exist_ok=True)
        self._last = b""

    def give(self, node: _NodeDesc) -> None:
        """Write a new sign: its content means nothing, only that it has changed."""
        self._write(node, os.urandom(8).hex().encode())

    def say_goodbye(self, node: _NodeDesc) -> None:
        """Write the final sign of a node that leaves."""
        self._write(node, _GOODBYE)

    def has_left(self, node: _NodeDesc) -> bool:
        """True if the node has written its final sign."""
        return self._read(node) == _GOODBYE

    def of(self, node: _NodeDesc) -> str:
        """Return a node's current sign; empty if there is none."""
        return self._read(node).decode(errors="replace")

    def all(self, nodes: Callable[[], Iterable[_NodeDesc]]) -> dict[str, str]:
        """Return the collected signs by node; collect them here if there is no new collection.

        Only the signs of `nodes` are read; files left by other nodes are ignored.
        """
        found = self._collected()
        if found is None or found == self._last:
            return self._collect(found, nodes)
        self._last = found
        return _signs(found)

    def forget(self) -> None:
        for old in (*self._lives.iterdir(), self._collection):
            old.unlink(missing_ok=True)

    def _collect(
        self, seen: bytes | None, nodes: Callable[[], Iterable[_NodeDesc]]
    ) -> dict[str, str]:
        """Collect all signs; if another node is doing that, return the existing collection."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_alone = try_lock(descriptor, self._lock)
            found = self._collected()
            self._last = found or b""
            if not is_alone or found != seen:
                return _signs(self._last)
            signs = {str(node): self.of(node) for node in nodes()}
            with contextlib.suppress(OSError):  # a full disk: then each node collects for itself
                self._write_collection(signs)
            return signs
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error
        finally:
            os.close(descriptor)

    def _write_collection(self, signs: dict[str, str]) -> None:
        """Write a collection; each is unique, so that a reader can tell that it is new."""
        data = json.dumps({"collection": os.urandom(8).hex(), "signs": signs}).encode()
        write_whole(self._collection, data)
        self._last = data

    def _collected(self) -> bytes | None:
        try:
            return read_bytes(self._collection, most=_MOST_BYTES)
        except OSError:
            return None

    def _read(self, node: _NodeDesc) -> bytes:
        try:
            return read_bytes(self._lives / str(node), length=len(_GOODBYE))
        except OSError:
            return b""

    def _write(self, node: _NodeDesc, sign: bytes) -> None:
        """Overwrite in place with a fixed length, which also works on a full disk."""
        try:
            descriptor = os.open(self._lives / str(node), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, sign, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error


def _signs(data: bytes) -> dict[str, str]:
    """Parse a collection; empty if it is damaged, since the next one replaces it."""
    try:
        return {str(name): str(sign) for name, sign in parse_json(data)["signs"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


# Which nodes are alive, as one node sees it: those whose sign has changed, by its own clock.
#
# A sign is never read as a time, because the clocks of two machines may differ by minutes, while a
# change since the last look does not depend on a clock. The price: a node that looks for the first
# time must wait for the full timeout before it can consider another node dead.

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Seen:
    changed_s: float
    looked_s: float
    sign: object = None
    read: object = None
    """What `read` returned last: the same value is not a change, even if `read_now` differed."""

    def note(self, sign: object, now_s: float) -> None:
        if sign != self.sign:
            self.sign, self.changed_s = sign, now_s


class Alive(Generic[Key]):
    """Detects dead nodes; `read` returns a node's sign of life and is called every `look_s`.

    Its result may be old, or None. `read_now` is called before a node is considered dead.
    """

    def __init__(
        self,
        read: Callable[[Key], object | None],
        read_now: Callable[[Key], object],
        patience_s: float,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._read_now = read_now
        self._patience_s = patience_s
        self._look_s = look_s
        self._clock = clock
        self._seen: dict[Key, _Seen] = {}

    def is_dead(self, who: Key) -> bool:
        """True if the sign has not changed for too long; a node seen for the first time is alive.

        A node's sign is first read at the second look, so that none is read when thousands join at
        once.
        """
        now_s = self._clock()
        seen = self._seen.setdefault(who, _Seen(now_s, now_s))
        if now_s - seen.looked_s >= self._look_s:
            seen.looked_s = now_s
            found = self._read(who)
            if found is not None and found != seen.read:
                seen.read = found
                seen.note(found, now_s)
        if now_s - seen.changed_s > self._patience_s:
            seen.note(self._read_now(who), now_s)
        return now_s - seen.changed_s > self._patience_s
