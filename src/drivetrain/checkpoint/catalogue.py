"""The catalogue: lists the checkpoints, their states, and what is wrong with damaged ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from drivetrain.checkpoint import index_check, lineage, manifest, unchanged
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest, parse_folder
from drivetrain.checkpoint.storage import Storage
from drivetrain.core.errors import DamagedRun

_BLOCK = 16 << 20
_MOST_MANIFEST_BYTES = 256 << 20
_UNFINISHED = f"no {manifest.NAME}: the save did not finish"
_BASE = "no longer a checkpoint: others refer to its bytes"
_REPLACED = "written by an attempt that another one had replaced"

State = Literal["good", "damaged", "unfinished", "replaced", "base"]


_STATES: dict[str, State] = {_UNFINISHED: "unfinished", _REPLACED: "replaced", _BASE: "base"}


@dataclass(frozen=True)
class Entry:
    """One checkpoint folder, with its manifest if it is good, else with a reason."""

    folder: str
    step: int
    attempt: int
    manifest: Manifest | None = None
    problem: str = ""
    refers_to: tuple[str, ...] = ()
    """Files of earlier checkpoints that it needs, where its manifest can be read."""

    @property
    def state(self) -> State:
        """unfinished: being written, or abandoned. replaced: from an attempt that lost the run.

        base: no longer a checkpoint, but others refer to its bytes.
        """
        if self.manifest is not None:
            return "good"
        return _STATES.get(self.problem, "damaged")


def entries(storage: Storage, *, check_sizes: bool = True) -> list[Entry]:
    """Return all checkpoint folders, newest first. Sizes are checked, contents are not read."""
    claims = lineage.read_claims(storage)
    found = [(parsed, name) for name in storage.names() if (parsed := parse_folder(name))]
    listed = []
    for (step, attempt), name in sorted(found, reverse=True):
        refers_to: tuple[str, ...] = ()
        try:
            described = read_manifest(storage, name, check_sizes=False)
            refers_to = tuple(each.name for each in described.referred or ())
            if check_sizes:
                _check_sizes(storage, described)
            if not lineage.belongs(step, attempt, claims):
                raise DamagedCheckpoint(_REPLACED)
        except DamagedCheckpoint as error:
            listed.append(Entry(name, step, attempt, None, str(error), refers_to))
        else:
            listed.append(Entry(name, step, attempt, described, "", refers_to))
    bases = {path.partition("/")[0] for entry in listed for path in entry.refers_to}
    return [
        replace(e, problem=_BASE) if e.state == "unfinished" and e.folder in bases else e
        for e in listed
    ]


def read_manifest(storage: Storage, folder: str, *, check_sizes: bool = True) -> Manifest:
    """Return the manifest, and check its files' existence and sizes (one request each)."""
    try:
        data = storage.read(f"{folder}/{manifest.NAME}", most=_MOST_MANIFEST_BYTES)
        described = Manifest.from_json(data)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(_UNFINISHED) from None
    except (IsADirectoryError, DamagedRun) as error:
        raise DamagedCheckpoint(
            f"{manifest.NAME} was not written by Drivetrain ({error})"
        ) from None
    if described.folder != folder:
        raise DamagedCheckpoint(f"{manifest.NAME} belongs to {described.folder}")
    if check_sizes:
        _check_sizes(storage, described)
    return described


def _check_sizes(storage: Storage, described: Manifest) -> None:
    for file in described.files:
        size = storage.size(f"{described.folder}/{file.name}")
        if size is None:
            raise DamagedCheckpoint(f"{file.name} is missing")
        if size != file.size:
            raise DamagedCheckpoint(f"{file.name} has {size:,} bytes, not {file.size:,}")
    for each in described.referred or ():
        if problem := unchanged.trouble(storage, each.name, each.size):
            raise unchanged.refusal(problem)


def verify(storage: Storage, folder: str) -> Manifest:
    """Read every byte; DamagedCheckpoint names the first file that is damaged."""
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
    if index_check.NAME in described.sizes:
        index = storage.read(f"{folder}/{index_check.NAME}", most=index_check.MOST_INDEX_BYTES)
        tensors = index_check.read_index(index, described.sizes)
        _verify_referred(storage, tensors)


def _verify_referred(storage: Storage, tensors: Mapping[str, Any]) -> None:
    """Verify its bytes in files of earlier checkpoints, and only those."""
    for name, entry in tensors.items():
        for _, _, file, start, length, crc32, *_ in entry["chunks"]:
            if "/" not in file:
                continue
            total = 0
            for block in _blocks(storage, file, length, start):
                total = zlib.crc32(block, total)
            if f"{total:08x}" != crc32:
                raise unchanged.refusal(f"{file} is damaged at {name}")


def _blocks(storage: Storage, name: str, size: int, start: int = 0) -> Iterator[bytes]:
    for done in range(0, size, _BLOCK):
        yield storage.read(name, start + done, min(_BLOCK, size - done))
