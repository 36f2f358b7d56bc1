"""Check that a checkpoint's index is one that Drivetrain could have written. Pure, without torch.

Checksums detect damage, but not an index that was manipulated. Each piece must be within a file of
the checkpoint, or within one that its manifest refers to, and must not share bytes with another
piece. The pieces of a tensor must cover it exactly: if two pieces overlapped or a part was missing,
other weights would be loaded than were trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.core.bounded import parse_json

NAME = "index.json"
MOST_INDEX_BYTES = 8 << 30
"""Enough for tens of millions of pieces."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BITS = re.compile(r"\D*?(\d+)\D*")
_BYTES = {"bool": 1, "half": 2, "float": 4, "double": 8, "short": 2, "int": 4, "long": 8}
Box = tuple[Sequence[int], Sequence[int]]


def read_index(data: bytes, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Parse the index, and check it against the checkpoint's files and their sizes in bytes."""
    try:
        # one document, or one line per rank that wrote pieces
        lines = data.split(b"\n") if b"}\n{" in data else [data]
        tensors = merged(map(parse_json, lines))
        taken: dict[str, list[tuple[int, int]]] = {}
        for name, entry in tensors.items():
            _check_tensor(name, entry, sizes, taken)
    except DamagedCheckpoint:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read ({error})") from error
    for file, ranges in taken.items():
        if _overlap_on_a_line(ranges):
            raise DamagedCheckpoint(f"{NAME} lists pieces that overlap in {file}")
    found: dict[str, Any] = tensors
    return found


def merged(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several ranks' pieces by tensor; ValueError if shapes or dtypes differ."""
    found: dict[str, Any] = {}
    for document in documents:
        for name, entry in document.items():
            known = found.setdefault(name, entry)
            if known is entry:
                continue
            if any(known[key] != entry[key] for key in ("dtype", "size")):
                raise ValueError(f"{name} has two shapes or dtypes")
            known["chunks"] += entry["chunks"]
    return found


def _check_tensor(
    name: str,
    entry: Mapping[str, Any],
    sizes: Mapping[str, int],
    taken: dict[str, list[tuple[int, int]]],
) -> None:
    whole, boxes = _numbers(entry["size"]), []
    for offsets, lengths, file, start, length, crc32, *digest in entry["chunks"]:
        box = _numbers(offsets, len(whole)), _numbers(lengths, len(whole))
        if any(at + size > most for at, size, most in zip(*box, whole, strict=True)):
            raise DamagedCheckpoint(f"{NAME} lists a piece outside of the shape of {name}")
        if not isinstance(file, str) or file not in sizes:
            raise DamagedCheckpoint(f"{NAME}: {name} is in {file!r}, not a file of this checkpoint")
        if not _is_within(start, length, sizes[file]):
            raise DamagedCheckpoint(f"{NAME} lists a piece of {name} outside of {file}")
        if not _fits(entry["dtype"], math.prod(box[1]), length):
            raise DamagedCheckpoint(f"{NAME} gives the wrong size for {name}")
        _check_sums(name, crc32, digest)
        boxes.append(box)
        if length:
            taken.setdefault(file, []).append((start, start + length))
    if sum(math.prod(lengths) for _, lengths in boxes) != math.prod(whole):
        raise DamagedCheckpoint(f"{NAME} lists pieces that do not cover the whole of {name}")
    if _overlap(boxes):
        raise DamagedCheckpoint(f"{NAME} lists pieces of {name} that overlap")


def _check_sums(name: str, crc32: Any, digest: Sequence[Any]) -> None:
    if not isinstance(crc32, str):
        raise TypeError(f"{name} has no checksum")
    if digest and (len(digest) > 1 or not _DIGEST.fullmatch(digest[0])):
        raise ValueError(f"{name} has an invalid digest")


def _numbers(values: Any, count: int | None = None) -> list[int]:
    if not isinstance(values, list) or any(type(each) is not int or each < 0 for each in values):
        raise ValueError(f"{values!r} is not a shape")
    if count is not None and len(values) != count:
        raise ValueError(f"{values!r} does not have {count} dimensions")
    return values


def _is_within(start: Any, length: Any, size: int) -> bool:
    whole = type(start) is int and type(length) is int
    return whole and start >= 0 and length >= 0 and start + length <= size


def _fits(dtype: Any, count: int, length: int) -> bool:
    """True if `count` numbers take `length` bytes, or if the dtype has less than 8 bits."""
    if not isinstance(dtype, str):
        raise TypeError(f"{dtype!r} is not a dtype")
    bits = _BITS.fullmatch(dtype.partition("_")[0])
    if dtype in _BYTES:
        return count * _BYTES[dtype] == length
    if bits is None or dtype.startswith(("q", "bits")):
        raise ValueError(f"{dtype} is not a dtype")
    return int(bits[1]) < 8 or count * int(bits[1]) == length * 8


def _overlap(boxes: Iterable[Box]) -> bool:
    """True if boxes overlap. Sweeps along the dim with the most distinct offsets."""
    filled = [box for box in boxes if math.prod(box[1])]
    if len(filled) < 2:
        return False
    num_dims = len(filled[0][0])
    if num_dims == 0:
        return True
    dim = max(range(num_dims), key=lambda d: len({offsets[d] for offsets, _ in filled}))
    return any(_meet(one, other) for one, other in _neighbours(filled, dim))


def _neighbours(boxes: list[Box], dim: int) -> Iterator[tuple[Box, Box]]:
    """Yield pairs of boxes whose ranges along `dim` overlap."""
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda each: each[0][dim]):
        at = box[0][dim]
        open_boxes = [each for each in open_boxes if each[0][dim] + each[1][dim] > at]
        yield from ((box, each) for each in open_boxes)
        open_boxes.append(box)


def _meet(one: Box, other: Box) -> bool:
    return all(
        a < b + b_size and b < a + a_size for a, a_size, b, b_size in zip(*one, *other, strict=True)
    )


def _overlap_on_a_line(ranges: list[tuple[int, int]]) -> bool:
    ordered = sorted(ranges)
    return any(end > start for (_, end), (start, _) in pairwise(ordered))
