"""Reading files that somebody else may have written: regular ones only, and only so much of them.

A run's directory lies where others can write. A pipe in it would make a reader wait for ever, a
link to an endless device would fill its memory, a text of ten lines can stand for a billion values.
Whoever reads a run's directory reads it through here.
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
"""Of a document that is read whole and parsed: run.yaml, job.json, an attempt's facts."""
LARGE_BYTES = 1 << 30
"""Of a file that grows with a run, and of what is read of one at once."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a pipe does not keep us waiting
_MOST_NODES = 20_000
_MOST_LEVELS = 64


def read_bytes(
    path: str | os.PathLike[str],
    start: int = 0,
    length: int | None = None,
    most: int = LARGE_BYTES,
) -> bytes:
    """A regular file, or a part of it; past its end there is nothing. OSError as open() has it."""
    descriptor = os.open(path, _FLAGS)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedRun(f"{os.fspath(path)}: {_kind(facts.st_mode)}, not a file; remove it")
        there = max(0, facts.st_size - start)
        wanted = there if length is None else min(there, length)
        if wanted > most:
            raise DamagedRun(
                f"{os.fspath(path)}: {readable_bytes(wanted)}, where at most"
                f" {readable_bytes(most)} are read; it is not what Drivetrain wrote"
            )
        return _read(descriptor, start, wanted)
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, wanted: int) -> bytes:
    first = os.pread(descriptor, wanted, start)
    parts, got = [first], len(first)
    while got < wanted and parts[-1]:  # the system hands out two gigabytes at most
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
    """A small text; ValueError when it is none."""
    return read_bytes(path, most=most).decode()


def parse_json(data: bytes | str) -> Any:
    """A JSON document; ValueError for whatever is wrong with it, depth included."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: bytes | str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """A YAML document that stays as small as it looks; ValueError or YAMLError otherwise."""
    _check_size(text)
    return yaml.load(text, loader)  # noqa: S506 - a SafeLoader


def _check_size(text: bytes | str) -> None:
    """Counts what is there once every alias is written out; nothing is built meanwhile."""
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
                raise ValueError(f"*{event.anchor} stands inside itself, or for nothing")
            anchor, size = None, sizes[event.anchor]
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, so_far = open_nodes.pop()
        if so_far + size > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES:,} values once aliases are written out")
        open_nodes.append((outer, so_far + size))


def read_json(path: Path) -> Any:
    """A small JSON file of a run; DamagedRun when it is there and cannot be read."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise DamagedRun(f"{path}: not JSON ({error}); it is not what Drivetrain wrote") from None


def read_yaml(path: Path) -> Any:
    """A small YAML file of a run; DamagedRun when it is there and cannot be read."""
    try:
        return parse_yaml(read_text(path))
    except (ValueError, yaml.YAMLError) as error:
        raise DamagedRun(f"{path}: not YAML ({one_line(error)})") from None


def one_line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Which addresses are followed that a person did not type but a file names.
#
# fsspec knows dozens of protocols; some run code that lies at the address, some wrap others
# (`a::b`), some are made to reach into this machine. A file that somebody else wrote may only name
# a path or an object store.

FOLLOWED = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")


def followed(where: str, address: Any) -> str:
    """The address, when it may be followed; ConfigError otherwise. `where` names the file's key."""
    if not isinstance(address, str):
        raise ConfigError([Problem(where, "not an address", "mend the file", address)])
    protocol, separator, _ = address.partition("://")
    is_path = not separator and "::" not in address
    if is_path or (protocol in FOLLOWED and "::" not in address):
        return address
    rule = f"a run's directory is only followed to a path or to {', '.join(FOLLOWED)}"
    remedy = "if you trust it, give the address yourself in place of the run's directory"
    raise ConfigError([Problem(where, rule, remedy, address)])
