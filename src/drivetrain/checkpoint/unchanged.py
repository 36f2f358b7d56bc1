"""Incremental saves: a piece that an earlier checkpoint stores is referred to, not written again.

The index names the file that holds the bytes, for example `step-000000200-a1/data-00000.bin`, and
never one that refers to another. So a reader needs one lookup, and retention asks one question:
does any manifest name this file? Such a file is kept even when its own checkpoint is deleted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drivetrain.checkpoint.manifest import DamagedCheckpoint, Reference
from drivetrain.checkpoint.storage import LocalStorage, Storage

if TYPE_CHECKING:  # `ls` and `verify` must not import torch
    from drivetrain.checkpoint.tensor_index import Piece


@dataclass(frozen=True)
class Form:
    """Identifies a piece: its tensor, its position and sizes, and its dtype."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Base:
    """The pieces of the run's last complete checkpoint that this rank knows."""

    pieces: Mapping[Form, Piece] = field(default_factory=dict)
    """Their file names are relative to the checkpoint folder."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of these files in bytes."""


class Unchanged:
    """Finds pieces in a base's files, for one save, which is written to `folder`."""

    def __init__(self, storage: Storage, base: Base, folder: str) -> None:
        self._storage = storage
        self._base = base
        self._own = f"{folder}/"
        """A step that is saved again must not refer to the files it overwrites."""

    def found(self, asked: Sequence[tuple[Form, str]]) -> tuple[dict[int, Piece], list[int]]:
        """Return unchanged pieces by their number in `asked`, and the numbers of those to rewrite.

        A file is worth keeping if at least half of its bytes are unchanged. Unchanged pieces in
        other files are rewritten: referring to them would keep the whole file, so a run that trains
        everything except a few buffers would keep its first checkpoint forever. They go to a
        separate file, all of which later saves need.
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
        """Return the size of one of the base's files in bytes."""
        return self._base.sizes[path]

    def _trouble(self, path: str) -> str:
        """Return what is wrong with a file that was deleted or replaced by hand; else empty."""
        return trouble(self._storage, path, self.size_of(path))


def apart_name(name: str) -> str:
    """Return the name of the file for a rank's rewritten, unchanged pieces."""
    return name.replace(".bin", "-unchanged.bin")


def digest_of(data: bytes | memoryview) -> str:
    """Return a digest that tells whether a piece's bytes have changed.

    Different pieces must never have the same digest, or a checkpoint would silently hold wrong
    weights. CRC-32, which detects damage, is not enough: it misses one change in four billion. No
    collision of 256-bit BLAKE2 is known.
    """
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def path_of(folder: str, file: str) -> str:
    """Return the path, relative to the checkpoint folder, of a file that an index names."""
    return file if "/" in file else f"{folder}/{file}"


def references(used: Iterable[tuple[str, int, int]]) -> tuple[Reference, ...]:
    """Merge (path, size, bytes used) entries; several ranks may use the same file."""
    found: dict[str, Reference] = {}
    for path, size, used_bytes in used:
        before = found[path].used_bytes if path in found else 0
        found[path] = Reference(path, size, before + used_bytes)
    return tuple(found[path] for path in sorted(found))


def trouble(storage: Storage, path: str, size: int) -> str:
    """Return what is wrong with a referenced file, without reading it; empty if nothing is."""
    if is_link(storage, path):
        return f"{path} is a link, not a file"
    found = storage.size(path)
    if found is None:
        return f"{path} is missing"
    return "" if found == size else f"{path} has {found:,} bytes, not {size:,}"


def is_link(storage: Storage, path: str) -> bool:
    """True if it or its folder is a link: references must stay inside the run."""
    if not isinstance(storage, LocalStorage):
        return False
    file = storage.path / path
    return file.is_symlink() or file.parent.is_symlink()


def refusal(problem: str) -> DamagedCheckpoint:
    """Return the error for a checkpoint whose bytes in an earlier one's file cannot be read."""
    return DamagedCheckpoint(
        f"{problem}; this checkpoint stores bytes in that file (checkpoint.incremental): restore "
        "it, or use a checkpoint that does not refer to it"
    )
