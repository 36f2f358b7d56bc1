"""Parts of checkpoints and data that a sample of mutants showed nobody was looking at."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from drivetrain import ConfigError
from drivetrain.checkpoint import pins
from drivetrain.checkpoint.contract import Change
from drivetrain.checkpoint.frozen import check_base
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.state import _random_state, _restore_random
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.weight_files import WeightFiles
from drivetrain.config.schema import Data
from drivetrain.data.device import to_device
from drivetrain.data.digest import Mark, _lighter
from drivetrain.data.fingerprint import content
from drivetrain.data.rank_check import _are_the_same, _Standing, splits_by
from drivetrain.data.ready_batches import check_sizes
from drivetrain.data.samplers import UserSampler
from drivetrain.data.sources import source_from
from drivetrain.data.stream import check_replay
from drivetrain.parallel.accelerator import accelerator_of

safetensors: Any = pytest.importorskip("safetensors")


def test_a_tensor_that_was_added_may_change_before_it_is_written(tmp_path: Path) -> None:
    files, tensor = WeightFiles(tmp_path), torch.arange(4.0)
    files.add("a", tensor)
    tensor.zero_()
    (name,) = files.finish()
    with safetensors.safe_open(tmp_path / name, "pt") as file:
        assert file.get_tensor("a").tolist() == [0.0, 1.0, 2.0, 3.0]
        assert file.metadata() == {"format": "pt"}, "transformers refuses files that do not say it"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_every_dtype_is_called_what_safetensors_calls_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    files = WeightFiles(tmp_path)
    files.add("a", torch.tensor([0.5, -2.0]).to(dtype))
    (name,) = files.finish()
    with safetensors.safe_open(tmp_path / name, "pt") as file:
        assert file.get_tensor("a").dtype == dtype
        assert file.get_tensor("a").float().tolist() == [0.5, -2.0]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - no secret


def test_every_random_stream_goes_on_where_it_was() -> None:
    accelerator = accelerator_of(torch.device("cpu"))
    state = _random_state(accelerator)
    before = draw()
    draw()
    _restore_random(state, accelerator)
    assert draw() == before


class Asked:
    """Knows which samples were looked at."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.ids.add(index)
        return index


def test_a_fingerprint_looks_at_both_ends_and_between() -> None:
    dataset = Asked()
    assert content(source_from(dataset, Data())) == content(source_from(dataset, Data()))
    assert {0, 999} <= dataset.ids
    assert len(dataset.ids) == 6


def test_pins_say_for_whom_a_checkpoint_stays(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("step-00000004-a1/manifest.json", b"{}")
    pins.pin(storage, "step-00000004-a1", "one")
    pins.pin(storage, "step-00000004-a1", "two")
    assert pins.pinned(storage) == {"step-00000004-a1": ["one", "two"]}
    pins.release(storage, "step-00000004-a1", "one")
    pins.release(storage, "step-00000004-a1", "one")  # gone already, and that is fine
    assert pins.pinned(storage) == {"step-00000004-a1": ["two"]}
    with pytest.raises(DamagedCheckpoint, match="deleted"):
        pins.pin(storage, "step-00000008-a1", "one")
    assert "step-00000008-a1" not in pins.pinned(storage)


def test_a_store_that_cannot_be_listed_is_said_in_its_first_line() -> None:
    with pytest.raises(ConfigError, match=r"cannot be listed \(.+\)") as found:
        locate("zip://nowhere.zip::/no/such/folder.zip")
    assert "\n" not in str(found.value).split("cannot be listed")[1].split(")")[0]


def test_a_frozen_weight_that_differs_is_named_as_the_model_names_it() -> None:
    own = {"model.a.weight": torch.ones(2)}
    words = r"^a\.weight: is frozen and differs from the base weights of step-4"
    with pytest.raises(ConfigError, match=words):
        check_base("step-4", {"model.a.weight": "0"}, own, lambda values: values)


def test_what_is_only_said_comes_with_its_meaning() -> None:
    said = str(Change("micro_batch_size", 2, 4, "said"))
    assert said == "micro_batch_size: 2 → 4; dropout and batch statistics differ from here on"


def test_ready_batches_of_another_size_say_which_to_set() -> None:
    check_sizes([4, 2], 4, is_first=True)
    check_sizes([2], 4, is_first=False)
    with pytest.raises(ConfigError, match=r"micro_batch_size = 4: .* batches of 6 .* set .*=6"):
        check_sizes([2, 6], 4, is_first=False)
    with pytest.raises(ConfigError, match="ready batches of 2 samples"):
        check_sizes([2], 4, is_first=True)


def test_an_epoch_that_was_drawn_knows_how_many_ids_it_has() -> None:
    sampler = torch.utils.data.BatchSampler(range(7), 3, drop_last=False)
    assert UserSampler(sampler, yields_batches=True, length=3).draw(0, 0).num_ids == 7
    assert UserSampler(range(7), yields_batches=False, length=7).draw(0, 0).num_ids == 7


def test_a_stream_that_is_shorter_than_it_was_is_said_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="has 3 samples, but the run had used 5 when it was s"):
        check_replay(iter(()), Mark(5, 1), Mark(3, 1))


class Pipeline:
    def __init__(self, *stages: Any) -> None:
        self.pipeline = [*stages]


def split_by_node(stream: Iterator[Any]) -> Iterator[Any]:
    return stream


def test_who_split_a_pipeline_is_known_by_name() -> None:
    assert splits_by(Pipeline(object(), split_by_node)) == "split_by_node"
    assert splits_by(Pipeline(object())) == ""


@pytest.mark.parametrize(
    ("changes", "are_same"),
    [({}, True), ({"is_known": False}, False), ({"shown": (1, 1)}, False), ({"epoch": 1}, False)],
)
def test_ranks_read_the_same_only_if_it_can_be_told(
    changes: dict[str, Any], are_same: bool
) -> None:
    given: dict[str, Any] = {
        "dp_index": 0,
        "epoch": 0,
        "mark": Mark(2, 9),
        "is_end": False,
        "is_known": True,
        "shown": (1, 2),
    }
    assert _are_the_same(_Standing(**{**given, **changes}), _Standing(**given)) is are_same


class Pair(NamedTuple):
    x: Any
    y: Any


def test_a_batch_keeps_its_form_on_the_way_to_a_device() -> None:
    tensor = torch.ones(2)
    moved = to_device(Pair({"a": tensor}, [tensor, "text"]), torch.device("meta"))
    assert isinstance(moved, Pair)
    assert moved.x["a"].is_meta
    assert isinstance(moved.y, list)
    assert (moved.y[0].is_meta, moved.y[1]) == (True, "text")


def test_of_a_large_tensor_at_most_64_kib_are_hashed() -> None:
    small, large = torch.ones(1 << 14), torch.ones(5 << 14)
    assert _lighter(small) is small
    shape, some = _lighter(large)
    assert shape == large.shape
    assert 1 << 13 < some.numel() <= 1 << 14
