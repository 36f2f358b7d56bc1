"""Weight files: their bytes, their index, what they refuse."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.weight_files import (
    INDEX,
    Tensor,
    WeightFile,
    WeightFiles,
    _header,
    index_of,
    raw_bytes,
    split,
)
from drivetrain.core.errors import ConfigError

safetensors: Any = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((torch.float64, "F64"), (torch.float32, "F32"), (torch.float16, "F16")),
        *((torch.bfloat16, "BF16"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.complex64, "C64")),
        *((torch.float8_e5m2, "F8_E5M2"), (torch.int64, "I64"), (torch.int32, "I32")),
        *((torch.int16, "I16"), (torch.int8, "I8"), (torch.uint64, "U64"), (torch.bool, "BOOL")),
        *((torch.uint32, "U32"), (torch.uint16, "U16"), (torch.uint8, "U8")),
    ],
)
def test_a_header_says_what_a_tensor_is_and_where(dtype: torch.dtype, name: str) -> None:
    data = _header([Tensor("a", dtype, (2, 3)), Tensor("b", dtype, ())])
    (length,) = struct.unpack("<Q", data[:8])
    assert length == len(data) - 8
    assert length % 8 == 0
    size = dtype.itemsize
    assert json.loads(data[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": name, "shape": [2, 3], "data_offsets": [0, 6 * size]},
        "b": {"dtype": name, "shape": [], "data_offsets": [6 * size, 7 * size]},
    }
    assert data[8:].rstrip(b" ").endswith(b"}")
    assert b" " not in data[8:].rstrip(b" "), "as small as safetensors writes it"


def test_a_number_format_that_safetensors_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _header([Tensor("a", torch.complex128, (1,))])
    assert str(caught.value) == (
        "a: has dtype torch.complex128, which safetensors does not support; use --format pt"
    )


def test_one_file_has_a_name_of_its_own_unless_there_is_an_index() -> None:
    tensors = [Tensor("a", torch.int8, (2,)), Tensor("b", torch.int8, (2,))]
    assert [file.name for file in split(tensors, 4)] == ["model.safetensors"]
    assert [file.name for file in split(tensors, 4, is_indexed=True)] == [
        "model-00001-of-00001.safetensors"
    ]
    assert split([], 4) == [WeightFile("model.safetensors", ())]
    two = split(tensors, 3)
    assert [file.name for file in two] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert index_of(two).decode() == (
        '{\n  "metadata": {\n    "total_size": 4\n  },\n  "weight_map": {\n'
        '    "a": "model-00001-of-00002.safetensors",\n'
        '    "b": "model-00002-of-00002.safetensors"\n  }\n}\n'
    )


def test_files_are_written_as_tensors_come_each_as_full_as_it_may_be(tmp_path: Path) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("a", 1), ("b", 2))}
    tensors |= {"c": torch.arange(6.0).view(2, 3).t(), "d": torch.ones(1)}
    files = WeightFiles(tmp_path, max_bytes=12)
    for name, tensor in tensors.items():
        files.add(name, tensor)
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert files.finish() == [*names, INDEX]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, INDEX])
    found = [safetensors.load_file(tmp_path / name) for name in names]
    assert [sorted(each) for each in found] == [["a", "b"], ["c"], ["d"]]
    for each in found:
        for name, tensor in each.items():
            assert torch.equal(tensor, tensors[name])
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == 4 * 10
    assert index["weight_map"]["c"] == names[1]


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    assert WeightFiles(tmp_path).finish() == ["model.safetensors"]
    assert safetensors.load_file(tmp_path / "model.safetensors") == {}


def test_bytes_of_a_tensor_are_its_numbers_in_order() -> None:
    turned = torch.arange(4, dtype=torch.uint8).view(2, 2).t()
    assert bytes(raw_bytes(turned)) == bytes([0, 2, 1, 3])
    assert bytes(raw_bytes(torch.ones(2, requires_grad=True))) == struct.pack("<2f", 1, 1)
    assert bytes(raw_bytes(torch.ones(0))) == b""
