"""The index of a checkpoint: written, read and checked."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from drivetrain.checkpoint import index_check, tensor_index
from drivetrain.checkpoint.index_check import merged, read_index
from drivetrain.checkpoint.manifest import DamagedCheckpoint, checksum
from drivetrain.checkpoint.tensor_index import Piece
from tests.checkpoint.parts import entry, metadata, piece


def test_lines_of_ranks_are_put_together_while_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        json.dumps({"a": {"dtype": "uint8", "size": [2], "chunks": [n]}}).encode() for n in (1, 2)
    ]
    file = io.BytesIO()
    size, crc32 = tensor_index.write_lines(lines, file)
    text = file.getvalue()
    assert json.loads(text) == {"a": {"dtype": "uint8", "size": [2], "chunks": [1, 2]}}
    assert (size, crc32) == (len(text), checksum(text))
    monkeypatch.setattr(tensor_index, "MOST_MERGED", 2 * len(lines[0]) - 1)
    many = io.BytesIO()
    size, crc32 = tensor_index.write_lines(iter([*lines, lines[0]]), many)
    assert many.getvalue() == b"\n".join([*lines, lines[0]])
    assert (size, crc32) == (len(many.getvalue()), checksum(many.getvalue()))


def test_an_index_comes_back_as_torchs_metadata() -> None:
    tensor = torch.arange(3.0)
    index = MetadataIndex("a", (0,))
    text = tensor_index.to_json(metadata(tensor), {index: Piece("f", 5, 12, "00000000")})
    back = tensor_index.from_json(text, {"f": 17})
    assert back.storage_data == {index: Piece("f", 5, 12, "00000000")}
    entry = tensor_index.described(back, "a")
    assert (entry.size, entry.properties.dtype) == (torch.Size([3]), torch.float32)
    assert entry.chunks == [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    plain_bytes = Metadata({"a": BytesStorageMetadata()})
    with pytest.raises(TypeError, match="^a: only tensors are stored as pieces$"):
        tensor_index.to_json(plain_bytes, {})
    with pytest.raises(DamagedCheckpoint, match="^a is not stored as a tensor$"):
        tensor_index.described(plain_bytes, "a")
    strange = text.replace(b"float32", b"strange32")
    with pytest.raises(
        DamagedCheckpoint, match=r"^index.json cannot be read \(strange32 is not a dtype\)$"
    ):
        tensor_index.from_json(strange, {"f": 17})


def test_an_index_is_one_document_or_a_line_for_each_rank() -> None:
    first, second = entry(piece(0, 3)), entry(piece(3, 1))
    whole = {"a": entry(piece(0, 3), piece(3, 1))}
    lines = [json.dumps({"a": each}) for each in (first, second)]
    assert read_index("\n".join(lines).encode(), {"f": 4}) == whole
    assert read_index(json.dumps(whole, indent=1).encode(), {"f": 4}) == whole


def test_pieces_of_one_tensor_must_be_of_one_form() -> None:
    assert merged([{"a": entry(piece(0, 4))}, {"b": entry()}]).keys() == {"a", "b"}
    for other in (entry(size=[5]), entry(dtype="int8")):
        with pytest.raises(ValueError, match="^a has two shapes or dtypes$"):
            merged([{"a": entry()}, {"a": other}])


def test_pieces_may_touch_and_not_overlap() -> None:
    def read(*chunks: Any, size: int = 4) -> None:
        read_index(json.dumps({"a": entry(*chunks)}).encode(), {"f": size, "g": size})

    read(piece(0, 2), piece(2, 2))
    read(piece(0, 2), piece(2, 2), piece(4, 0, 0))
    read(piece(0, 2), piece(2, 2, 0, "g"))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists pieces that overlap in f$"):
        read(piece(0, 2), piece(2, 2, 1))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists pieces of a that overlap$"):
        read(piece(0, 2), piece(1, 2, 2))
    words = "^index.json lists a piece outside of the shape of a$"
    with pytest.raises(DamagedCheckpoint, match=words):
        read(piece(0, 2), piece(3, 2, 2))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists a piece of a outside of f$"):
        read(piece(0, 4), size=3)
    with pytest.raises(DamagedCheckpoint, match="lists pieces that do not cover the whole of a$"):
        read(piece(0, 3))
    with pytest.raises(DamagedCheckpoint, match="'h', not a file of this checkpoint$"):
        read(piece(0, 4, 0, "h"))
    without_sum = [*piece(0, 4)[:5], 0]
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read \(a has no checksum\)"):
        read(without_sum)


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        *(("bool", 1), ("half", 2), ("float", 4), ("double", 8), ("short", 2), ("int", 4)),
        *(("long", 8), ("uint8", 1), ("int16", 2), ("bfloat16", 2), ("float32", 4), ("int64", 8)),
        *(("complex64", 8), ("complex128", 16), ("float8_e4m3fn", 1)),
    ],
)
def test_a_piece_has_as_many_bytes_as_its_numbers_take(dtype: str, itemsize: int) -> None:
    assert index_check._fits(dtype, 3, 3 * itemsize)
    assert not index_check._fits(dtype, 3, 3 * itemsize + 1)
    assert not index_check._fits(dtype, 2, 3 * itemsize)


def test_numbers_of_less_than_a_byte_may_be_packed_and_others_are_no_formats() -> None:
    assert index_check._fits("uint4", 3, 2)
    assert index_check._fits("uint7", 3, 1)
    for dtype in ("quint8", "bits8", "nothing"):
        with pytest.raises(ValueError, match=f"^{dtype} is not a dtype$"):
            index_check._fits(dtype, 1, 1)
    with pytest.raises(TypeError, match="^5 is not a dtype$"):
        index_check._fits(5, 1, 1)


@pytest.mark.parametrize(
    ("boxes", "overlap"),
    [
        ([], False),
        ([([0, 0], [2, 2])], False),
        ([([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [1, 4])], False),
        ([([0, 0], [2, 2]), ([1, 1], [2, 2])], True),
        ([([0, 0], [4, 1]), ([1, 1], [1, 1]), ([3, 0], [1, 1])], True),
        ([([0, 0], [2, 2]), ([1, 1], [0, 2])], False),
        ([([], []), ([], [])], True),
        ([([0, 0], [3, 1]), ([0, 1], [1, 1]), ([1, 1], [2, 1])], False),
    ],
)
def test_boxes_overlap_where_they_share_a_number(boxes: Any, overlap: bool) -> None:
    assert index_check._overlap(boxes) is overlap


def test_a_shape_is_a_list_of_counts_of_the_right_length() -> None:
    assert index_check._numbers([0, 2], 2) == [0, 2]
    assert index_check._numbers([]) == []
    with pytest.raises(ValueError, match=r"^\[1\] does not have 2 dimensions$"):
        index_check._numbers([1], 2)
    for wrong in ((1,), [-1], [True], "1", [1.0]):
        with pytest.raises(ValueError, match="is not a shape$"):
            index_check._numbers(wrong)
