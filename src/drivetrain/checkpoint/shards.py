"""Shards: how torch's distributed checkpointing reads and writes our files.

torch says which pieces a rank holds, and re-shards on load; who writes what several hold is settled
in `sharing`. Pieces go to one file per rank, raw, with a checksum each, and come back checked.
Tensors only.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
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

from drivetrain.checkpoint import lineage, tensor_index
from drivetrain.checkpoint.failures import RanksFailed, reason
from drivetrain.checkpoint.index_check import MOST_INDEX_BYTES
from drivetrain.checkpoint.manifest import DamagedCheckpoint, File, Manifest, checksum
from drivetrain.checkpoint.sharing import Held, Sharing, hear_first, receive_from, send_to_first
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.tensor_index import Piece
from drivetrain.checkpoint.weight_files import raw_bytes

Commit = Callable[[list[File]], None]
_AT_ONCE = 16 << 20


class SharePlanner(DefaultSavePlanner):
    """Torch's plan of what this rank holds, less what others write."""

    def __init__(self, sharing: Sharing) -> None:
        super().__init__(flatten_state_dict=False)
        self._sharing = sharing

    def create_local_plan(self) -> SavePlan:
        """The pieces of this rank. A collective call."""
        items = super().create_local_plan().items
        mine = self._sharing.of([_held(item) for item in items])
        self.plan = SavePlan([item for item, is_mine in zip(items, mine, strict=True) if is_mine])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Of this rank alone: that its pieces are not the whole is no mistake."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


def _held(item: WriteItem) -> Held:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn}: only tensors are stored as pieces")
    count = math.prod(data.chunk.sizes)
    offsets = tuple(item.index.offset or ())
    return Held(item.index.fqn, offsets, count * data.properties.dtype.itemsize)


class ShardWriter(StorageWriter):
    """One rank's file. Rank 0 of the group hears what each has written, adds the index and commits.

    A rank that cannot write says so there, and then all of them have failed.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        rank: int,
        commit: Commit,
        await_copies: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._await_copies = await_copies
        self._storage = storage
        self._folder = folder
        self._name = f"data-{rank:05d}.bin"
        self._commit = commit
        self._group = group
        self._file: File | None = None
        self._problem = ""

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
        done: Future[list[WriteResult]] = Future()
        written: list[WriteResult] = []
        try:
            if plan.items:
                written = self._write(plan.items, planner)
        except Exception as error:  # the others wait to be told
            self._problem = reason(error)
        done.set_result(written)
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        self._await_copies()
        written = []
        start, whole = 0, 0
        with self._storage.writing(f"{self._folder}/{self._name}") as file:
            for item in items:
                data = raw_bytes(cast(torch.Tensor, planner.resolve_data(item)))
                file.write(data)
                piece = Piece(self._name, start, len(data), checksum(data))
                whole = zlib.crc32(data, whole)
                start += len(data)
                written.append(WriteResult(item.index, piece.length, piece))
        self._file = File(self._name, start, f"{whole:08x}")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Once every rank's file is safe: the index, then the commit. A collective call."""
        own = self._told(metadata, results)
        if self._group is not None and dist.get_rank(self._group):
            send_to_first(own, self._group)
            outcome = ["", ""]
        else:
            outcome = self._conclude(own)
        if self._group is not None:
            outcome = json.loads(hear_first(json.dumps(outcome).encode(), self._group))
        kind, text = outcome
        if kind:
            raise lineage.StaleAttempt(text) if kind == "stale" else RanksFailed(text)

    def _told(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        """What rank 0 hears of this one: how it went, its file, and a line for the index."""
        facts = None if self._file is None else [self._file.size, self._file.crc32]
        head = json.dumps([self._problem, self._name, facts]).encode()
        pieces = {each.index: each.storage_data for rank in results for each in rank}
        return head + b"\n" + (b"{}" if self._problem else tensor_index.to_json(metadata, pieces))

    def _conclude(self, own: bytes) -> list[str]:
        """The kind of failure, if it is one, and what to say of it."""
        problems: list[str] = []
        files: list[File] = []

        def lines() -> Iterator[bytes]:
            for told in self._everyones(own):
                head, _, line = told.partition(b"\n")
                problem, name, facts = json.loads(head)
                problems.extend([problem] if problem else [])
                files.extend([] if facts is None else [File(name, *facts)])
                yield line

        heard = lines()
        try:
            with self._storage.writing(f"{self._folder}/{tensor_index.NAME}") as file:
                size, crc32 = tensor_index.write_lines(heard, file)
            if problems:
                return ["failed", problems[0]]
            files.sort(key=lambda each: each.name)
            self._commit([*files, File(tensor_index.NAME, size, crc32)])
        except lineage.StaleAttempt as error:
            return ["stale", str(error)]
        except Exception as error:
            for _ in heard:  # the others have something to say before they listen
                pass
            return ["failed", problems[0] if problems else reason(error)]
        return ["", ""]

    def _everyones(self, own: bytes) -> Iterator[bytes]:
        yield own
        if self._group is not None:
            for rank in range(1, dist.get_world_size(self._group)):
                yield receive_from(rank, self._group)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Never chosen by torch, always by us."""
        return False


class ShardReader(StorageReader):
    """Reads pieces and holds each to its checksum; a wrong one is never copied anywhere."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._folder = manifest.folder
        self._sizes = {file.name: file.size for file in manifest.files}
        self._index = next((f for f in manifest.files if f.name == tensor_index.NAME), None)
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The index."""
        if self._metadata is None:
            data = self._storage.read(f"{self._folder}/{tensor_index.NAME}", most=MOST_INDEX_BYTES)
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
            return self._storage.read(name, piece.start + start, length, most=length)
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
