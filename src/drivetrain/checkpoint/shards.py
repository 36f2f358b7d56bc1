"""Shards: how torch's distributed checkpointing reads and writes our files.

torch determines which pieces a rank holds, and re-shards on load; `sharing` decides which rank
writes a piece that several hold. Each rank writes its raw pieces to one file, with a checksum per
piece that is verified on load. Tensors only.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from drivetrain.checkpoint import lineage, tensor_index
from drivetrain.checkpoint.failures import RanksFailed, reason
from drivetrain.checkpoint.index_check import MOST_INDEX_BYTES
from drivetrain.checkpoint.manifest import (
    DamagedCheckpoint,
    File,
    Manifest,
    Reference,
    checksum,
)
from drivetrain.checkpoint.sharing import Held, Sharing, hear_first, receive_from, send_to_first
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.tensor_index import Piece, dtype_name
from drivetrain.checkpoint.unchanged import (
    Base,
    Form,
    Unchanged,
    apart_name,
    digest_of,
    is_link,
    path_of,
    references,
    refusal,
)
from drivetrain.checkpoint.weight_files import raw_bytes

Commit = Callable[[list[File], tuple[Reference, ...]], None]
_AT_ONCE = 16 << 20


class SharePlanner(DefaultSavePlanner):
    """Torch's plan for this rank's pieces, without those that other ranks write."""

    def __init__(self, sharing: Sharing) -> None:
        super().__init__(flatten_state_dict=False)
        self._sharing = sharing

    def create_local_plan(self) -> SavePlan:
        """Plan the pieces that this rank writes. A collective call."""
        items = super().create_local_plan().items
        mine = self._sharing.of([_held(item) for item in items])
        self.plan = SavePlan([item for item, is_mine in zip(items, mine, strict=True) if is_mine])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan this rank only, without torch's check that the pieces cover the whole tensors."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


def _held(item: WriteItem) -> Held:
    data = _described(item)
    count = math.prod(data.chunk.sizes)
    offsets = tuple(item.index.offset or ())
    return Held(item.index.fqn, offsets, count * data.properties.dtype.itemsize)


def _form(item: WriteItem) -> Form:
    data = _described(item)
    return _form_of(item.index, data.chunk, data.properties.dtype)


def _form_of(index: MetadataIndex, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Form:
    return Form(index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), dtype_name(dtype))


def _data(item: WriteItem, planner: SavePlanner) -> memoryview:
    return raw_bytes(cast(torch.Tensor, planner.resolve_data(item)))


def _described(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors are stored as pieces")
    return item.tensor_data


class ShardWriter(StorageWriter):
    """Writes one rank's file. Rank 0 of the group collects the results, adds the index and commits.

    If one rank reports that it cannot write, the save fails on all ranks. Pieces that are in `base`
    are not written again.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        rank: int,
        commit: Commit,
        await_copies: Callable[[], None] = lambda: None,
        group: dist.ProcessGroup | None = None,
        base: Base | None = None,
    ) -> None:
        self.base: Base | None = None
        """This rank's pieces, once the checkpoint exists: the base of the next save."""
        self.written_bytes: int | None = None
        """Bytes written by all ranks, once the checkpoint exists."""
        self.referred_bytes: int | None = None
        """Bytes of all ranks that are in files of earlier checkpoints."""
        self._unchanged = None if base is None else Unchanged(storage, base, folder)
        self._next_base = Base()
        self._used: list[tuple[str, int, int]] = []
        self._await_copies = await_copies
        self._storage = storage
        self._folder = folder
        self._name = f"data-{rank:05d}.bin"
        self._commit = commit
        self._group = group
        self._files: list[File] = []
        self._problem = ""

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: the folder is created with the first file."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plan unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces one after the other."""
        done: Future[list[WriteResult]] = Future()
        written: list[WriteResult] = []
        try:
            if plan.items:
                written = self._write(plan.items, planner)
        except Exception as error:  # `finish` reports it to the other ranks, which are waiting
            self._problem = reason(error)
        done.set_result(written)
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        self._await_copies()
        pieces: dict[int, Piece] = {}
        digests = [""] * len(items)
        files: dict[str, list[int]] = {self._name: list(range(len(items)))}
        if self._unchanged is not None:
            digests = [digest_of(_data(item, planner)) for item in items]
            asked = [(_form(item), digest) for item, digest in zip(items, digests, strict=True)]
            pieces, apart = self._unchanged.found(asked)
            others = pieces.keys() | set(apart)
            changed = [number for number in files[self._name] if number not in others]
            files = {self._name: changed, apart_name(self._name): apart}
        for name, numbers in files.items():
            if numbers:
                pieces |= self._write_file(name, numbers, items, digests, planner)
        if self._unchanged is not None:
            self._next_base = self._known(items, pieces)
        return [
            WriteResult(item.index, pieces[number].length, pieces[number])
            for number, item in enumerate(items)
        ]

    def _write_file(
        self,
        name: str,
        numbers: Sequence[int],
        items: Sequence[WriteItem],
        digests: Sequence[str],
        planner: SavePlanner,
    ) -> dict[int, Piece]:
        pieces = {}
        start, whole = 0, 0
        with self._storage.writing(f"{self._folder}/{name}") as file:
            for number in numbers:
                data = _data(items[number], planner)
                file.write(data)
                pieces[number] = Piece(name, start, len(data), checksum(data), digests[number])
                whole = zlib.crc32(data, whole)
                start += len(data)
        self._files.append(File(name, start, f"{whole:08x}"))
        return pieces

    def _known(self, items: Sequence[WriteItem], pieces: Mapping[int, Piece]) -> Base:
        """Return the base of the next save, and note what this save refers to."""
        known: dict[Form, Piece] = {}
        sizes = {path_of(self._folder, file.name): file.size for file in self._files}
        for number, piece in pieces.items():
            path = path_of(self._folder, piece.file)
            known[_form(items[number])] = replace(piece, file=path)
            if path not in sizes and self._unchanged is not None:
                sizes[path] = self._unchanged.size_of(path)
            if path == piece.file:
                self._used.append((path, sizes[path], piece.length))
        return Base(known, sizes)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and commit, once every rank's file is durable. A collective call."""
        own = self._told(metadata, results)
        if self._group is not None and dist.get_rank(self._group):
            send_to_first(own, self._group)
            outcome: list[Any] = ["", "", 0, 0]
        else:
            outcome = self._conclude(own)
        if self._group is not None:
            outcome = json.loads(hear_first(json.dumps(outcome).encode(), self._group))
        kind, text, written_bytes, referred_bytes = outcome
        if kind:
            raise lineage.StaleAttempt(text) if kind == "stale" else RanksFailed(text)
        self.written_bytes, self.referred_bytes = written_bytes, referred_bytes
        self.base = self._next_base

    def _told(self, metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
        """Return this rank's report to rank 0: its problem, its files, and a line of the index."""
        files = [astuple(file) for file in self._files]
        used = [astuple(each) for each in references(self._used)]
        head = json.dumps([self._problem, files, used]).encode()
        pieces = {each.index: each.storage_data for rank in results for each in rank}
        return head + b"\n" + (b"{}" if self._problem else tensor_index.to_json(metadata, pieces))

    def _conclude(self, own: bytes) -> list[Any]:
        """Return [kind of failure or "", message, bytes written, bytes referred to]."""
        problems: list[str] = []
        files: list[File] = []
        used: list[tuple[str, int, int]] = []

        def lines() -> Iterator[bytes]:
            for told in self._everyones(own):
                head, _, line = told.partition(b"\n")
                problem, own_files, own_used = json.loads(head)
                problems.extend([problem] if problem else [])
                files.extend(File(*each) for each in own_files)
                used.extend(own_used)
                yield line

        heard = lines()
        try:
            with self._storage.writing(f"{self._folder}/{tensor_index.NAME}") as file:
                size, crc32 = tensor_index.write_lines(heard, file)
            if problems:
                return ["failed", problems[0], 0, 0]
            files = [*sorted(files, key=lambda f: f.name), File(tensor_index.NAME, size, crc32)]
            referred = references(used)
            self._commit(files, referred)
        except lineage.StaleAttempt as error:
            return ["stale", str(error), 0, 0]
        except Exception as error:
            for _ in heard:  # the other ranks send their reports before they receive the outcome
                pass
            return ["failed", problems[0] if problems else reason(error), 0, 0]
        return ["", "", sum(f.size for f in files), sum(r.used_bytes for r in referred)]

    def _everyones(self, own: bytes) -> Iterator[bytes]:
        yield own
        if self._group is not None:
            for rank in range(1, dist.get_world_size(self._group)):
                yield receive_from(rank, self._group)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Reject every id: Drivetrain creates this class itself."""
        return False


class ShardReader(StorageReader):
    """Reads pieces and verifies their checksums; a damaged piece is never copied anywhere."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._folder = manifest.folder
        self._sizes = manifest.sizes
        self._index = next((f for f in manifest.files if f.name == tensor_index.NAME), None)
        self._metadata: Metadata | None = None
        self._loaded: list[MetadataIndex] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return the index."""
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
        """Keep the index that was read."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each piece once, even if several parts of it are needed."""
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for index, wanted in sorted(items.items(), key=lambda entry: self._order(entry[0])):
            tensor = self.tensor(index)
            self._loaded.append(index)
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
        """Yield a piece in blocks; raise DamagedCheckpoint after the last if it is damaged."""
        piece: Piece = self.read_metadata().storage_data[index]
        found = 0
        for done in range(0, piece.length, _AT_ONCE):
            data = self._read(piece, done, min(_AT_ONCE, piece.length - done))
            found = zlib.crc32(data, found)
            yield data
        if f"{found:08x}" != piece.crc32:
            raise _wrong(piece, f"is damaged at {index.fqn}")

    def _read(self, piece: Piece, start: int, length: int) -> bytes:
        name = path_of(self._folder, piece.file)
        if name == piece.file and is_link(self._storage, name):
            raise _wrong(piece, "is a link, not a file")
        try:
            return self._storage.read(name, piece.start + start, length, most=length)
        except FileNotFoundError as error:
            raise _wrong(piece, "is missing") from error

    def base(self) -> Base:
        """Return the pieces this rank has loaded, as a base for an incremental save."""
        metadata, pieces = self.read_metadata(), {}
        for index in self._loaded:
            piece: Piece = metadata.storage_data[index]
            if piece.digest:
                described, chunk = self._chunk(index)
                form = _form_of(index, chunk, described.properties.dtype)
                pieces[form] = replace(piece, file=path_of(self._folder, piece.file))
        sizes = {path_of(self._folder, name): size for name, size in self._sizes.items()}
        return Base(pieces, sizes)

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return one stored piece, verified."""
        metadata = self.read_metadata()
        piece: Piece = metadata.storage_data[index]
        described, chunk = self._chunk(index)
        data = self._read(piece, 0, piece.length)
        if len(data) != piece.length or checksum(data) != piece.crc32:
            raise _wrong(piece, f"is damaged at {index.fqn}")
        dtype = described.properties.dtype
        if piece.length != math.prod(chunk.sizes) * dtype.itemsize:
            raise DamagedCheckpoint(f"{tensor_index.NAME} gives the wrong size for {index.fqn}")
        if not data:
            return torch.empty(chunk.sizes, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(chunk.sizes)

    def _chunk(self, index: MetadataIndex) -> tuple[TensorStorageMetadata, ChunkStorageMetadata]:
        described = tensor_index.described(self.read_metadata(), index.fqn)
        chunk = next(c for c in described.chunks if c.offsets == (index.offset or c.offsets))
        return described, chunk

    def _order(self, index: MetadataIndex) -> tuple[str, int]:
        piece: Piece = self.read_metadata().storage_data[index]
        return piece.file, piece.start

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Reject every id: Drivetrain creates this class itself."""
        return False


def _wrong(piece: Piece, what: str) -> DamagedCheckpoint:
    problem = f"{piece.file} {what}"
    return refusal(problem) if "/" in piece.file else DamagedCheckpoint(problem)
