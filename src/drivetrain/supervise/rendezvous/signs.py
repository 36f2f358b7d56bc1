"""Signs of life: each node changes a file of its own, and one node reads them all for the others.

Were every node to read every other's file, a thousand that wait for the last would read a million
files every few seconds. So one collects what the files say, in one file that the others read; who
finds that file as it was at its last look collects them itself.
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
"""Of all signs: half a million nodes."""


class SignsOfLife:
    """The nodes' files, in a folder that all of them share."""

    def __init__(self, folder: Path) -> None:
        self._lives = folder / "lives"
        self._collection = folder / "signs"
        self._lock = folder / "signs.lock"
        self._lives.mkdir(parents=True, exist_ok=True)
        self._last = b""

    def give(self, node: _NodeDesc) -> None:
        """What a sign says means nothing, that it has changed does."""
        self._write(node, os.urandom(8).hex().encode())

    def say_goodbye(self, node: _NodeDesc) -> None:
        """The last sign: nobody need wait for another."""
        self._write(node, _GOODBYE)

    def has_left(self, node: _NodeDesc) -> bool:
        """Whether a node has said so itself."""
        return self._read(node) == _GOODBYE

    def of(self, node: _NodeDesc) -> str:
        """As it is now; empty when there is none."""
        return self._read(node).decode(errors="replace")

    def all(self, nodes: Callable[[], Iterable[_NodeDesc]]) -> dict[str, str]:
        """By node, as they were collected lately; who finds nothing new collects them itself.

        `nodes` are those there are. Others have left files behind: nobody reads them.
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
        """Read all files and write what they say; while somebody else does so, what there is."""
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
        """Two of them differ even when no sign does: who reads one sees that it is new."""
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
        """Always of one length and in place: there is room for it on a full disk, too."""
        try:
            descriptor = os.open(self._lives / str(node), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, sign, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RendezvousConnectionError(str(error)) from error


def _signs(data: bytes) -> dict[str, str]:
    """Of a collection; none of one that is damaged, which the next that is written replaces."""
    try:
        return {str(name): str(sign) for name, sign in parse_json(data)["signs"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


# Who is alive, as one node sees it: whose sign of life has changed, by this node's own clock.
#
# What a sign says is never read as a time. The clocks of two machines may differ by minutes;
# whether something has changed since the last look is the same on all of them. The price: who looks
# for the first time must look for as long as the dead are given before they are believed to be
# dead.

Key = TypeVar("Key", bound=Hashable)


@dataclass
class _Seen:
    changed_s: float
    looked_s: float
    sign: object = None
    read: object = None
    """What `read` last gave: the same again is no news, also where `read_now` has given another."""

    def note(self, sign: object, now_s: float) -> None:
        if sign != self.sign:
            self.sign, self.changed_s = sign, now_s


class Alive(Generic[Key]):
    """`read` gives somebody's sign of life; it is asked no more often than every `look_s`.

    What it gives may be old, or None. `read_now` has the last word before somebody is believed to
    be dead.
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
        """Whether the sign has not changed for too long; who is seen first is alive.

        The first sign is read at the second look: where thousands come at once, nobody need read.
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
