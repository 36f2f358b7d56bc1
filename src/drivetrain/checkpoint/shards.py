"""Shards: how torch's distributed checkpointing reads and writes our files.

torch plans who writes what, removes duplicates and re-shards on load; here the planned pieces go to
one file per rank, raw, with a checksum each, and come back checked. Tensors only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from drivetrain.checkpoint import tensor_index
from drivetrain.checkpoint.index_check import MOST_INDEX_BYTES
from drivetrain.checkpoint.manifest import DamagedCheckpoint, File, Manifest, checksum
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.tensor_index import Piece
from drivetrain.checkpoint.weight_files import raw_bytes

Commit = Callable[[list[File]], None]
_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator about each piece, and about its file."""

    piece: Piece
    file: File


class ShardWriter(StorageWriter):
    """One rank's file; the coordinator adds the index and commits."""

    def __init__(
        self,
        place: Storage,
        folder: str,
        rank: int,
        commit: Commit,
        await_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._await_copies = await_copies
        self._place = place
        self._folder = folder
        self._name = f"data-{rank:05d}.bin"
        self._commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: folders come with the first file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """All of this rank's pieces, one after the other."""
        written: list[tuple[WriteItem, Piece]] = []
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        self._await_copies()
        start, whole = 0, 0
        with self._place.writing(f"{self._folder}/{self._name}") as file:
            for item in plan.items:
                data = raw_bytes(cast(torch.Tensor, planner.resolve_data(item)))
                file.write(data)
                piece = Piece(self._name, start, len(data), checksum(data))
                whole = zlib.crc32(data, whole)
                start += len(data)
                written.append((item, piece))
        entry = File(self._name, start, f"{whole:08x}")
        done.set_result(
            [
                WriteResult(item.index, piece.length, _Written(piece, entry))
                for item, piece in written
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once every rank's file is safe: the index, then the commit."""
        written = {result.index: result.storage_data for rank in results for result in rank}
        pieces = {index: each.piece for index, each in written.items()}
        index = tensor_index.to_json(metadata, pieces)
        with self._place.writing(f"{self._folder}/{tensor_index.NAME}") as file:
            file.write(index)
        files = {each.file for each in written.values()}
        self._commit(
            [
                *sorted(files, key=lambda file: file.name),
                File(tensor_index.NAME, len(index), checksum(index)),
            ]
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Never chosen by torch, always by us."""
        return False


class ShardReader(StorageReader):
    """Reads pieces and holds each to its checksum; a wrong one is never copied anywhere."""

    def __init__(self, place: Storage, manifest: Manifest) -> None:
        self._place = place
        self._folder = manifest.folder
        self._sizes = {file.name: file.size for file in manifest.files}
        self._index = next((f for f in manifest.files if f.name == tensor_index.NAME), None)
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The index."""
        if self._metadata is None:
            data = self._place.read(f"{self._folder}/{tensor_index.NAME}", most=MOST_INDEX_BYTES)
            if self._index is None or checksum(data) != self._index.crc32:
                raise DamagedCheckpoint(f"{tensor_index.NAME} does not match its checksum")
            self._metadata = tensor_index.from_json(data, self._sizes)
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """The index that was read."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each piece is read once, however many parts of it are needed."""
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for index, wanted in sorted(items.items(), key=lambda entry: self._order(entry[0])):
            tensor = self.tensor(index)
            for item in wanted:
                part = tensor
                for dim, (start, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, size)
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stream(self, index: MetadataIndex) -> Iterator[bytes]:
        """A stored piece's bytes, some at a time; DamagedCheckpoint behind the last if it is."""
        piece: Piece = self.read_metadata().storage_data[index]
        found = 0
        for done in range(0, piece.length, _AT_ONCE):
            data = self._read(piece, done, min(_AT_ONCE, piece.length - done))
            found = zlib.crc32(data, found)
            yield data
        if f"{found:08x}" != piece.crc32:
            raise DamagedCheckpoint(f"{piece.file} is damaged at {index.fqn}")

    def _read(self, piece: Piece, start: int, length: int) -> bytes:
        name = f"{self._folder}/{piece.file}"
        try:
            return self._place.read(name, piece.start + start, length, most=length)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{piece.file} is missing") from error

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        """One stored piece, checked."""
        metadata = self.read_metadata()
        piece: Piece = metadata.storage_data[index]
        described = tensor_index.described(metadata, index.fqn)
        chunk = next(c for c in described.chunks if c.offsets == (index.offset or c.offsets))
        data = self._read(piece, 0, piece.length)
        if len(data) != piece.length or checksum(data) != piece.crc32:
            raise DamagedCheckpoint(f"{piece.file} is damaged at {index.fqn}")
        dtype = described.properties.dtype
        if piece.length != math.prod(chunk.sizes) * dtype.itemsize:
            raise DamagedCheckpoint(f"{tensor_index.NAME} gives {index.fqn} a wrong form")
        if not data:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(chunk.sizes)

    def _order(self, index: MetadataIndex) -> tuple[str, int]:
        piece: Piece = self.read_metadata().storage_data[index]
        return piece.file, piece.start

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Never chosen by torch, always by us."""
        return False
