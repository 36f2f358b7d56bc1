"""Bounded reads of files that others may have written: regular files only, up to a size limit.

Others may be able to write to a run's directory. A pipe in it would block a reader forever, a link
to an endless device would fill its memory, and ten lines of YAML can expand to a billion values.
All code that reads a run's directory uses this module.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.text import readable_bytes

SMALL_BYTES = 4 << 20
"""Limit for a document that is read whole and parsed: run.yaml, job.json, an attempt's facts."""
LARGE_BYTES = 1 << 30
"""Limit for one read from a file that grows with a run."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # opening a pipe does not block
_MOST_NODES = 20_000
_MOST_LEVELS = 64


class NotAFile(DamagedRun):
    """What a path names is a folder or a device; `rule` is for the errors of the user's own files.

    In a run's directory it is somebody's mistake, and perhaps a large folder of theirs: they are
    told to move it, not to delete it.
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path, kind)  # the arguments as they are: errors travel between processes
        self.path, self.rule = path, f"{kind}, not a file"

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}; Drivetrain did not create it: move it away"


def read_bytes(
    path: str | os.PathLike[str],
    start: int = 0,
    length: int | None = None,
    most: int = LARGE_BYTES,
) -> bytes:
    """Return the bytes of a regular file, or of a part; nothing past its end. May raise OSError.

    NotAFile if it is not a regular file, DamagedRun if more than `most` bytes would be read.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise NotAFile(os.fspath(path), _kind(facts.st_mode))
        there = max(0, facts.st_size - start)
        wanted = there if length is None else min(there, length)
        if wanted > most:
            raise DamagedRun(
                f"{os.fspath(path)}: {readable_bytes(wanted)}, but at most"
                f" {readable_bytes(most)} are read; Drivetrain did not write this file"
            )
        return _read(descriptor, start, wanted)
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, wanted: int) -> bytes:
    first = os.pread(descriptor, wanted, start)
    parts, got = [first], len(first)
    while got < wanted and parts[-1]:  # Linux returns at most two gigabytes per call
        parts.append(os.pread(descriptor, wanted - got, start + got))
        got += len(parts[-1])
    return first if len(parts) == 1 else b"".join(parts)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "something else")


def read_text(path: str | os.PathLike[str], most: int = SMALL_BYTES) -> str:
    """Return the text of a small file; ValueError if it is not text."""
    return read_bytes(path, most=most).decode()


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON document; ValueError for anything wrong with it, including its depth."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: bytes | str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse a YAML document; ValueError or YAMLError if it is invalid or its aliases expand."""
    _check_size(text)
    return yaml.load(text, loader)  # noqa: S506 - a SafeLoader


def _check_size(text: bytes | str) -> None:
    """Count the values with every alias expanded, without building them; ValueError if too many."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > _MOST_LEVELS:
                raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"*{event.anchor} refers to itself or to no anchor")
            anchor, size = None, sizes[event.anchor]
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, so_far = open_nodes.pop()
        if so_far + size > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES:,} values once aliases are expanded")
        open_nodes.append((outer, so_far + size))


def read_json(path: Path) -> Any:
    """Return a small JSON file of a run; DamagedRun if it exists and cannot be parsed."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise DamagedRun(
            f"{path}: not JSON ({error}); Drivetrain did not write this file"
        ) from None


def read_yaml(path: Path) -> Any:
    """Return a small YAML file of a run; DamagedRun if it exists and cannot be parsed."""
    try:
        return parse_yaml(read_text(path))
    except (ValueError, yaml.YAMLError) as error:
        raise DamagedRun(f"{path}: not YAML ({one_line(error)})") from None


def one_line(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Which addresses are followed if they come from a file and not from the user.
#
# fsspec supports dozens of protocols. Some run code stored at the address, some wrap others
# (`a::b`), and some reach into this machine. A file that somebody else wrote may therefore only
# name a path or an object store.

FOLLOWED = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")


def followed(where: str, address: Any) -> str:
    """Return the address if it may be followed, else ConfigError. `where` names the file's key."""
    if not isinstance(address, str):
        raise ConfigError([Problem(where, "not a path or URL", "fix the file", address)])
    protocol, separator, _ = address.partition("://")
    is_path = not separator and "::" not in address
    if is_path or (protocol in FOLLOWED and "::" not in address):
        return address
    rule = f"an address in a run's directory may only be a path or use {', '.join(FOLLOWED)}"
    remedy = "if you trust it, pass the address yourself instead of the run's directory"
    raise ConfigError([Problem(where, rule, remedy, address)])
