"""The manifest: a checkpoint exists once this file does, and it says everything about it.

It is written last, at once, and lists every other file with its size and checksum. Whatever is not
in a manifest is not part of a checkpoint.
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
"""The format of what may refer to files of earlier checkpoints; releases before it refuse it."""
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
    """From the folder of checkpoints: step-000000200-a1/data-00000.bin."""
    size: int
    used_bytes: int
    """How many of them are this checkpoint's."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    step: int
    """After this many optimizer steps."""
    attempt: int
    """Which attempt wrote it."""
    layout: Mapping[str, int]
    """Ranks along each axis."""
    strategy: str
    position: Mapping[str, Any]
    """Where the data stands: epoch, and samples used so far."""
    contents: Contents = "everything"
    files: tuple[File, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """All that makes the next step and is not a tensor."""
    contract: Mapping[str, Any] = field(default_factory=dict)
    """What decided the run's numbers; see contract.py."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created_s: float = 0.0
    referred: tuple[Reference, ...] | None = None
    """None: all of its bytes are its own, as before there were incremental saves."""

    @property
    def folder(self) -> str:
        """Where it lies: no two attempts ever write to the same place."""
        return folder_name(self.step, self.attempt)

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    @property
    def num_referred_bytes(self) -> int:
        """Of it that are in files of earlier checkpoints."""
        return sum(each.used_bytes for each in self.referred or ())

    @property
    def sizes(self) -> dict[str, int]:
        """In bytes, of every file that the index may name, as it names it."""
        own = {file.name: file.size for file in self.files}
        return own | {each.name: each.size for each in self.referred or ()}

    def to_json(self) -> bytes:
        """With a checksum of its own as the last key."""
        facts = asdict(self)
        if self.referred is None:
            del facts["referred"]
        version = FORMAT if self.referred is None else WITH_REFERENCES
        body = json.loads(json.dumps({"format": version, **facts}))
        return json.dumps({**body, "self_crc32": fingerprint(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read and check it; DamagedCheckpoint when it is not what was written."""
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
                raise ValueError(f"referred is not as format {version} has it")
            if version == WITH_REFERENCES:
                body["referred"] = tuple(Reference(**each) for each in body["referred"])
            return _checked(cls(**body))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{NAME} lacks what it must have ({error})") from error


def _checked(manifest: Manifest) -> Manifest:
    """Whether every value is of its kind; ValueError names the first that is not."""
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
        raise ValueError(f"{wrong[0]} is not of its kind")
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11


def _is_file(file: File) -> bool:
    """A file directly in the checkpoint's folder, whatever else there may be on the machine."""
    has_name = isinstance(file.name, str) and _FILE.fullmatch(file.name) is not None
    has_sum = isinstance(file.crc32, str) and len(file.crc32) == 8
    return has_name and _is_count(file.size) and has_sum


def _are_references(manifest: Manifest) -> bool:
    """Data files of other checkpoints beside this one, and of nothing else; each once."""
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
    """A checkpoint's folder; names sort by step."""
    return f"step-{step:09d}-a{attempt}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a checkpoint's folder; None for anything else."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def fingerprint(body: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, however it is written."""
    return checksum(json.dumps(body, sort_keys=True).encode())


def checksum(data: bytes | memoryview) -> str:
    """CRC-32 in hex: finds damage, at several gigabytes a second."""
    return f"{zlib.crc32(data):08x}"
