"""Incremental saves: a piece whose bytes an earlier checkpoint has is named, not written again.

The index names it as `step-000000200-a1/data-00000.bin`, always the file that holds the bytes and
never one that refers to another. So a reader looks in one place, and retention asks one question:
does any manifest name this file? A file that one names stays, also when its own checkpoint is gone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain.checkpoint.manifest import DamagedCheckpoint, Reference
from drivetrain.checkpoint.storage import LocalStorage, Storage

if TYPE_CHECKING:  # for `ls` and `verify`, which do not wait for torch
    from drivetrain.checkpoint.tensor_index import Piece


@dataclass(frozen=True)
class Form:
    """Which part of which tensor a piece is, and of what numbers."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Base:
    """What the run's last complete checkpoint has, as far as this rank knows it."""

    pieces: Mapping[Form, Piece] = field(default_factory=dict)
    """Their files are paths from the folder of checkpoints."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of these files, in bytes."""


class Unchanged:
    """Finds pieces in a base's files, for one save, which is written to `folder`."""

    def __init__(self, storage: Storage, base: Base, folder: str) -> None:
        self._storage = storage
        self._base = base
        self._own = f"{folder}/"
        """A step that is saved again must not refer to what it is about to write over."""

    def found(self, asked: Sequence[tuple[Form, str]]) -> tuple[dict[int, Piece], list[int]]:
        """By number in `asked`: pieces whose bytes lie in files that are worth keeping for them.

        And the numbers of those whose bytes have not changed either, but are less than half of
        their file. It would be kept whole for them, and a run that trains all but a few buffers
        would keep its first checkpoint for ever. They are written once more, to a file apart, of
        which later saves need all.
        """
        same = {}
        for number, (form, digest) in enumerate(asked):
            known = self._base.pieces.get(form)
            if known is None or not known.length or known.file.startswith(self._own):
                continue
            if known.digest == digest:
                same[number] = known
        used: Counter[str] = Counter()
        for piece in same.values():
            used[piece.file] += piece.length
        worth = {path for path, count in used.items() if 2 * count >= self.size_of(path)}
        there = {path for path in worth if not self._trouble(path)}
        pieces = {number: piece for number, piece in same.items() if piece.file in there}
        return pieces, [number for number in same if number not in pieces]

    def size_of(self, path: str) -> int:
        """Of one of the base's files, in bytes."""
        return self._base.sizes[path]

    def _trouble(self, path: str) -> str:
        """Somebody may have deleted it by hand, or put a link in its place."""
        return trouble(self._storage, path, self.size_of(path))


def apart_name(name: str) -> str:
    """Of the file for pieces that have not changed, beside a rank's `name`."""
    return name.replace(".bin", "-unchanged.bin")


def digest_of(data: bytes | memoryview) -> str:
    """Of a piece's bytes, to tell whether they are the same.

    Two different pieces must never come to the same one, or a checkpoint would silently hold the
    wrong weights. CRC-32, which finds damage, is no use for that: one change in four billion goes
    unnoticed. Of 256 bits of BLAKE2 nobody has found two that are equal.
    """
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def path_of(folder: str, file: str) -> str:
    """Of a file as an index names it, from the folder of checkpoints."""
    return file if "/" in file else f"{folder}/{file}"


def references(used: Iterable[tuple[str, int, int]]) -> tuple[Reference, ...]:
    """Out of (path, size, bytes used), which several ranks may say of the same file."""
    found: dict[str, Reference] = {}
    for path, size, used_bytes in used:
        before = found[path].used_bytes if path in found else 0
        found[path] = Reference(path, size, before + used_bytes)
    return tuple(found[path] for path in sorted(found))


def trouble(storage: Storage, path: str, size: int) -> str:
    """What is wrong with a file that is referred to, without reading it; empty: nothing."""
    if is_link(storage, path):
        return f"{path} is a link, not a file"
    found = storage.size(path)
    if found is None:
        return f"{path} is missing"
    return "" if found == size else f"{path} has {found:,} bytes, not {size:,}"


def is_link(storage: Storage, path: str) -> bool:
    """Whether it, or its folder, leads elsewhere: a checkpoint refers to its own run's only."""
    if not isinstance(storage, LocalStorage):
        return False
    file = storage.path / path
    return file.is_symlink() or file.parent.is_symlink()


def refusal(problem: str) -> DamagedCheckpoint:
    """Of a checkpoint whose bytes in an earlier one's file cannot be had."""
    return DamagedCheckpoint(
        f"{problem}; bytes of this checkpoint are in it (checkpoint.incremental): put the file "
        "back as it was, or use a checkpoint that does not refer to it"
    )
