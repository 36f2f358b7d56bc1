"""Small parts of checkpoints and data, each by itself."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.data import TensorDataset

from drivetrain import ConfigError
from drivetrain.checkpoint.compare import _values
from drivetrain.checkpoint.failures import no_good_one
from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.index_check import _is_within
from drivetrain.checkpoint.state import TrainingState, plain
from drivetrain.checkpoint.weight_files import (
    Tensor,
    WeightFile,
    index_of,
    split,
)
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.checkpoint.zip_sums import set_sums
from drivetrain.config.schema import Data
from drivetrain.data.batches import BatchPlan
from drivetrain.data.feed import PlannedOrder
from drivetrain.data.sources import is_stream, source_from
from drivetrain.train.saving.weights import _replace


@pytest.mark.parametrize(
    ("start", "length", "is_within"),
    [(0, 5, True), (5, 0, True), (0, 6, False), (-1, 2, False), (3, -1, False)],
)
def test_bytes_of_a_piece_lie_in_their_file(start: int, length: int, is_within: bool) -> None:
    assert _is_within(start, length, 5) is is_within


@pytest.mark.parametrize("number", ["1", 1.0, True, None])
def test_only_whole_numbers_are_places_in_a_file(number: object) -> None:
    assert not _is_within(number, 1, 5)
    assert not _is_within(1, number, 5)


def test_the_widest_numbers_come_first_in_a_file() -> None:
    """Then each begins at a multiple of its size."""
    tensors = (Tensor("a", torch.int8, (3,)), Tensor("b", torch.float32, (2,)))
    stream = io.BytesIO()
    contents = {"a": b"aaa", "b": b"bbbbbbbb"}
    WeightFile("model.safetensors", tensors).write(stream, lambda name: [contents[name]])
    header = json.loads(stream.getvalue()[8:-11])
    assert header["b"]["data_offsets"] == [0, 8]
    assert header["a"]["data_offsets"] == [8, 11]
    assert stream.getvalue().endswith(b"bbbbbbbbaaa")


def test_a_tensor_that_is_cut_short_is_not_written_in_silence() -> None:
    file = WeightFile("model.safetensors", (Tensor("a", torch.int8, (3,)),))
    with pytest.raises(RuntimeError, match="a: 2 bytes, not 3"):
        file.write(io.BytesIO(), lambda _: [b"aa"])


def test_files_are_as_full_as_they_may_be() -> None:
    tensors = [Tensor(f"w{n}", torch.int8, (size,)) for n, size in enumerate((4, 6, 1, 20, 3))]
    files = split(tensors, 10)
    held = ["".join(t.name for t in file.tensors) for file in files]
    assert held == ["w0w1", "w2", "w3", "w4"]
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == 34
    assert index["weight_map"]["w3"] == files[2].name == "model-00003-of-00004.safetensors"


def test_differences_of_values() -> None:
    ours, theirs = {"a": 1, "b": [1, torch.ones(2)]}, {"b": [1, 2.0], "c": float("nan")}
    found = [(d.name, d.here, d.there) for d in _values(ours, theirs)]
    assert found[0] == ("a", "1", "absent")
    assert found[1][0] == "b.1"
    assert found[2] == ("c", "absent", "nan")
    assert list(_values({"x": float("nan")}, {"x": float("nan")})) == []


def test_what_cannot_be_saved_is_named_however_deep_it_lies() -> None:
    with pytest.raises(ConfigError, match=r"param_groups.hook = object: cannot be saved"):
        plain([{"inner": object()}], "param_groups.hook")


def test_damage_without_anything_before_it_says_where_and_what_to_do() -> None:
    assert str(no_good_one("step-4 (index.json is missing)", "runs/a/checkpoints")) == (
        "checkpoints = runs/a/checkpoints: no checkpoint is good: step-4 (index.json is missing); "
        "remove them to start over, or set checkpoint.resume_from"
    )


def test_state_that_had_not_come_into_being_is_dropped_and_the_rest_stays() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = TrainingState(model, optimizer)
    state.forget(["optimizer.weight.exp_avg"])
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg_sq"}
    state.forget([f"optimizer.bias.{key}" for key in ("step", "exp_avg", "exp_avg_sq", "other")])
    assert model.bias not in optimizer.state
    assert model.weight in optimizer.state


def test_what_can_be_indexed_is_no_stream_and_one_sample_is_enough() -> None:
    assert not is_stream([1, 2])
    assert is_stream(iter([1, 2]))
    assert source_from(TensorDataset(torch.ones(1, 2)), Data()).length == 1
    with pytest.raises(ConfigError, match="has no samples"):
        source_from(TensorDataset(torch.ones(0, 2)), Data())


def test_a_loader_is_asked_for_so_many_micro_batches() -> None:
    plan = BatchPlan(8, 2, 2, 40)
    order = PlannedOrder(plan, 0, range(3))
    assert len(order) == len(list(order)) == 6


class Pieces:
    """Reads pieces of one tensor, and counts how often."""

    def __init__(self, whole: torch.Tensor, sizes: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.whole, self.sizes = whole, sizes
        self.num_read = 0

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        self.num_read += 1
        assert index.offset is not None
        row, column = index.offset
        rows, columns = self.sizes[row, column]
        return self.whole[row : row + rows, column : column + columns].clone()

    def stream(self, index: MetadataIndex) -> list[bytes]:
        return [self.tensor(index).numpy().tobytes()]


@pytest.mark.parametrize(
    "sizes",
    [
        {(0, 0): (2, 5), (2, 0): (4, 5)},  # rows
        {(0, 0): (6, 2), (0, 2): (6, 3)},  # columns
        {(0, 0): (3, 2), (3, 0): (3, 2), (0, 2): (2, 3), (2, 2): (4, 3)},  # cut at other rows
        {(0, 0): (6, 4), (0, 4): (6, 1), (6, 0): (0, 5)},  # one of them empty
    ],
)
def test_pieces_of_a_tensor_come_out_as_its_bytes_in_order(
    sizes: dict[tuple[int, int], tuple[int, int]],
) -> None:
    whole = torch.arange(30.0).view(6, 5)
    chunks = [
        ChunkStorageMetadata(torch.Size(at), torch.Size(size))
        for at, size in reversed(sizes.items())
    ]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), whole.shape, chunks)
    tensors = WholeTensors.__new__(WholeTensors)  # without a checkpoint on disk
    reader: Any = Pieces(whole, sizes)
    tensors._reader, tensors._metadata = reader, Metadata({"w": entry})
    assert b"".join(map(bytes, tensors.stream("w"))) == whole.numpy().tobytes()
    assert reader.num_read == len([chunk for chunk in chunks if chunk.sizes[0]])  # each once


def test_sums_of_a_zip_whose_bytes_were_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as made:
        for name in ("a", "a longer name"):
            made.writestr(name, bytes(16))
    data = path.read_bytes().replace(bytes(16), b"x" * 16)
    path.write_bytes(data)
    starts = [at for at in range(len(data)) if data.startswith(b"x" * 16, at)]
    with zipfile.ZipFile(path) as found:
        assert found.testzip() == "a"
    set_sums(path, dict.fromkeys(starts, zlib.crc32(b"x" * 16)))
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None


class Engine:
    """Keeps weights and optimizer state to itself, as DeepSpeed's does."""

    def __init__(self) -> None:
        self.model = {"w": torch.zeros(2)}
        self.optimizer: dict[str, Any] = {"w.exp_avg": torch.zeros(2), "w.step": 0}

    def model_state(self) -> dict[str, torch.Tensor]:
        return self.model

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        return self.optimizer

    def put_back(self, model: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
        self.model, self.optimizer = model, optimizer


class Counter:
    """Something of the user's that has a state."""

    value = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_an_engine_gets_back_what_it_gave_by_the_same_names() -> None:
    engine: Any = Engine()
    model, own = nn.Linear(1, 1), Counter()
    state = GatheredState(model, None, keeper=engine, own={"mine": own})  # type: ignore[dict-item]
    targets = state.load_targets()
    assert set(targets) == {"model.w", "optimizer.w.exp_avg"}
    for number, name in enumerate(sorted(targets), 1):
        targets[name].fill_(number)
    saved = {"groups": None, "values": {"optimizer.w.step": 7}}
    state.restore({"optimizer": saved, "common": {}}, {"mine": {"value": 3}})
    assert engine.model["w"].tolist() == [1, 1]
    assert engine.optimizer["w.exp_avg"].tolist() == [2, 2]
    assert engine.optimizer["w.step"] == 7
    assert own.value == 3


def test_the_same_weights_are_the_same_file(tmp_path: Path) -> None:
    """So that `sha256sum` of two runs' weights.pt says whether they ended with the same bits."""
    for folder in ("one", "another"):
        _replace({"w": torch.arange(3.0)}, tmp_path / folder / "weights.pt")
    one, another = (tmp_path / folder / "weights.pt" for folder in ("one", "another"))
    assert one.read_bytes() == another.read_bytes()
