"""The manifest: a checkpoint exists once this file does, and it describes the checkpoint.

It is written last, atomically, and lists every other file with its size and checksum. A file that
is not in the manifest is not part of the checkpoint.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from drivetrain.core.bounded import parse_json

FORMAT = 1
WITH_REFERENCES = 2
"""Format of checkpoints that may refer to earlier ones' files; older releases refuse it."""
NAME = "manifest.json"
_FOLDER = re.compile(r"step-([0-9]+)-a([0-9]+)")
_DATA = re.compile(r"data-[0-9]{5,}(-unchanged)?\.bin")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Contents = Literal["everything", "trained", "weights"]


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded; the message says what is wrong with it."""


@dataclass(frozen=True)
class File:
    """One file of a checkpoint."""

    name: str
    size: int
    crc32: str


@dataclass(frozen=True)
class Reference:
    """A file of an earlier checkpoint that holds bytes of this one; see unchanged.py."""

    name: str
    """Relative to the checkpoint folder: step-000000200-a1/data-00000.bin."""
    size: int
    used_bytes: int
    """How many of its bytes belong to this checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    """The number of optimizer steps done."""
    attempt: int
    """The attempt that wrote it."""
    layout: Mapping[str, int]
    """Ranks along each axis."""
    strategy: str
    position: Mapping[str, Any]
    """The position in the data: epoch, and samples used so far."""
    contents: Contents = "everything"
    files: tuple[File, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything except tensors that the next step depends on."""
    contract: Mapping[str, Any] = field(default_factory=dict)
    """The settings that determine the run's results; see contract.py."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    referred: tuple[Reference, ...] | None = None
    """None: it refers to no other files, as before incremental saves existed."""

    @property
    def folder(self) -> str:
        """Its folder: no two attempts ever write to the same one."""
        return folder_name(self.step, self.attempt)

    @property
    def num_bytes(self) -> int:
        """Total size of its own files."""
        return sum(file.size for file in self.files)

    @property
    def num_referred_bytes(self) -> int:
        """Bytes of it that are in files of earlier checkpoints."""
        return sum(each.used_bytes for each in self.referred or ())

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of every file that the index may name, by the name it uses."""
        own = {file.name: file.size for file in self.files}
        return own | {each.name: each.size for each in self.referred or ()}

    def to_json(self) -> bytes:
        """Serialize it, with a checksum of the manifest itself as the last key."""
        facts = asdict(self)
        if self.referred is None:
            del facts["referred"]
        version = FORMAT if self.referred is None else WITH_REFERENCES
        body = json.loads(json.dumps({"format": version, **facts}))
        return json.dumps({**body, "self_crc32": fingerprint(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse and check it; raise DamagedCheckpoint if it is not what was written."""
        try:
            body = parse_json(data)
            own = body.pop("self_crc32")
            version = body["format"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedCheckpoint(f"{NAME} cannot be read ({error})") from error
        if version not in (FORMAT, WITH_REFERENCES):
            known = f"{FORMAT} and {WITH_REFERENCES}"
            raise DamagedCheckpoint(f"{NAME} has format {version}; this release reads {known}")
        if own != fingerprint(body):
            raise DamagedCheckpoint(f"{NAME} does not match its own checksum")
        del body["format"]
        try:
            body["files"] = tuple(File(**file) for file in body["files"])
            if ("referred" in body) != (version == WITH_REFERENCES):
                raise ValueError(f"referred does not match format {version}")
            if version == WITH_REFERENCES:
                body["referred"] = tuple(Reference(**each) for each in body["referred"])
            return _checked(cls(**body))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{NAME} is not valid ({error})") from error


def _checked(manifest: Manifest) -> Manifest:
    """Check the type and range of every value; ValueError names the first invalid one."""
    wrong = [
        name
        for name, is_right in {
            "step": _is_count(manifest.step),
            "attempt": _is_count(manifest.attempt),
            "layout": _is_mapping(manifest.layout)
            and all(map(_is_count, manifest.layout.values())),
            "strategy": isinstance(manifest.strategy, str),
            "position": _is_mapping(manifest.position),
            "contents": manifest.contents in ("everything", "trained", "weights"),
            "values": _is_mapping(manifest.values),
            "contract": _is_mapping(manifest.contract),
            "versions": _is_mapping(manifest.versions),
            "created_s": _is_moment(manifest.created_s),
            "files": all(map(_is_file, manifest.files)),
            "referred": _are_references(manifest),
        }.items()
        if not is_right
    ]
    if wrong:
        raise ValueError(f"{wrong[0]} has an invalid value")
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11


def _is_file(file: File) -> bool:
    """True if it names a file directly in the checkpoint's folder, never one elsewhere."""
    has_name = isinstance(file.name, str) and _FILE.fullmatch(file.name) is not None
    has_sum = isinstance(file.crc32, str) and len(file.crc32) == 8
    return has_name and _is_count(file.size) and has_sum


def _are_references(manifest: Manifest) -> bool:
    """True if they are data files of this run's other checkpoints, each listed once."""
    referred = manifest.referred or ()
    names = {each.name for each in referred if isinstance(each.name, str)}
    return len(names) == len(referred) and all(
        _is_data_file(each.name, manifest.folder)
        and _is_count(each.size)
        and _is_count(each.used_bytes)
        and each.used_bytes <= each.size
        for each in referred
    )


def _is_data_file(name: str, own_folder: str) -> bool:
    folder, _, file = name.partition("/")
    parsed = parse_folder(folder)
    is_folder = parsed is not None and folder == folder_name(*parsed) != own_folder
    return is_folder and _DATA.fullmatch(file) is not None


def folder_name(step: int, attempt: int) -> str:
    """Return a checkpoint's folder name; names sort by step."""
    return f"step-{step:09d}-a{attempt}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a checkpoint's folder; None for any other name."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def fingerprint(body: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object, independent of its formatting."""
    return checksum(json.dumps(body, sort_keys=True).encode())


def checksum(data: bytes | memoryview) -> str:
    """Return the CRC-32 in hex: it detects damage at several gigabytes per second."""
    return f"{zlib.crc32(data):08x}"
