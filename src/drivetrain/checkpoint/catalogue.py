"""The catalogue: which checkpoints there are, which of them are good, and why not the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drivetrain.checkpoint import index_check, lineage, manifest
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest, parse_folder
from drivetrain.checkpoint.storage import Storage
from drivetrain.core.errors import DamagedRun

_BLOCK = 16 << 20
_MOST_MANIFEST_BYTES = 256 << 20
_UNFINISHED = f"no {manifest.NAME}: it was never finished"
_REPLACED = "written by an attempt that had been replaced"

State = Literal["good", "damaged", "unfinished", "replaced"]


@dataclass(frozen=True)
class Entry:
    """One folder; with a manifest when it is a checkpoint, with a reason when it is not."""

    folder: str
    step: int
    attempt: int
    manifest: Manifest | None = None
    problem: str = ""

    @property
    def state(self) -> State:
        """unfinished: being written, or given up. replaced: of an attempt that lost the run."""
        if self.manifest is not None:
            return "good"
        if self.problem == _UNFINISHED:
            return "unfinished"
        return "replaced" if self.problem == _REPLACED else "damaged"


def entries(storage: Storage, *, check_sizes: bool = True) -> list[Entry]:
    """Every checkpoint folder, newest first. Sizes are checked, contents are not read."""
    claims = lineage.read_claims(storage)
    found = [(parsed, name) for name in storage.names() if (parsed := parse_folder(name))]
    listed = []
    for (step, attempt), name in sorted(found, reverse=True):
        try:
            described = read_manifest(storage, name, check_sizes=check_sizes)
            if not lineage.belongs(step, attempt, claims):
                raise DamagedCheckpoint(_REPLACED)
        except DamagedCheckpoint as error:
            listed.append(Entry(name, step, attempt, problem=str(error)))
        else:
            listed.append(Entry(name, step, attempt, described))
    return listed


def read_manifest(storage: Storage, folder: str, *, check_sizes: bool = True) -> Manifest:
    """The manifest, if every file it lists is there with its size: one request per file."""
    try:
        data = storage.read(f"{folder}/{manifest.NAME}", most=_MOST_MANIFEST_BYTES)
        described = Manifest.from_json(data)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(_UNFINISHED) from None
    except (IsADirectoryError, DamagedRun) as error:
        raise DamagedCheckpoint(f"{manifest.NAME} is no file of Drivetrain's ({error})") from None
    if described.folder != folder:
        raise DamagedCheckpoint(f"{manifest.NAME} belongs to {described.folder}")
    for file in described.files if check_sizes else ():
        size = storage.size(f"{folder}/{file.name}")
        if size is None:
            raise DamagedCheckpoint(f"{file.name} is missing")
        if size != file.size:
            raise DamagedCheckpoint(f"{file.name} has {size:,} bytes, not {file.size:,}")
    return described


def verify(storage: Storage, folder: str) -> Manifest:
    """Read every byte; DamagedCheckpoint names the first file that is not what was written."""
    described = read_manifest(storage, folder)
    try:
        _verify_files(storage, folder, described)
    except (OSError, DamagedRun) as error:
        raise DamagedCheckpoint(f"cannot be read ({error})") from error
    return described


def _verify_files(storage: Storage, folder: str, described: Manifest) -> None:
    for file in described.files:
        total = 0
        for block in _blocks(storage, f"{folder}/{file.name}", file.size):
            total = zlib.crc32(block, total)
        if f"{total:08x}" != file.crc32:
            raise DamagedCheckpoint(f"{file.name} does not match its checksum")
    strangers = set(storage.names(folder)) - {file.name for file in described.files}
    strangers -= {manifest.NAME}
    if strangers:
        raise DamagedCheckpoint(f"{min(strangers)} is not in the manifest")
    sizes = {file.name: file.size for file in described.files}
    if index_check.NAME in sizes:
        index = storage.read(f"{folder}/{index_check.NAME}", most=index_check.MOST_INDEX_BYTES)
        index_check.read_index(index, sizes)


def _blocks(storage: Storage, name: str, size: int) -> Iterator[bytes]:
    for start in range(0, size, _BLOCK):
        yield storage.read(name, start, min(_BLOCK, size - start))
