"""Sources: what can be read as data, and what is refused by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError
from drivetrain.data.ray_rows import RayRows, is_ray_dataset
from drivetrain.data.sources import is_stream, refuse_one_pass, source_from
from tests.data.parts import Numbers, Order, Stream, stream_source


class Rows:
    __module__ = "ray.data.dataset"

    def __init__(self) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iter_rows(self) -> list[dict[str, int]]:
        return [{"a": 1}, {"a": 2}]


def test_rows_of_ray_come_in_their_order() -> None:
    rows = Rows()
    assert is_ray_dataset(rows)
    assert not is_ray_dataset([1])
    assert not is_ray_dataset(type("Other", (), {"__module__": "ray.data.x"})())
    assert not is_ray_dataset(SimpleNamespace(iter_rows=1))
    stream = RayRows(rows)
    assert list(stream) == [{"a": 1}, {"a": 2}]
    assert rows.context.execution_options.preserve_order is True
    made = source_from(Rows(), Data())
    assert isinstance(made.dataset, RayRows)
    assert made.length is None


def test_a_dataset_takes_its_settings_from_the_config() -> None:
    config = Data(shuffle=False, num_workers=3, prefetch_factor=5, pin_memory=True)
    made = source_from([1, 2], config)
    assert (made.length, made.shuffle, made.num_workers, made.prefetch_factor) == (2, False, 3, 5)
    assert (made.pin_memory, made.is_batched, made.sampler) == (True, False, None)
    assert made.collate is default_collate
    assert source_from([1], Data()).pin_memory is None
    assert source_from([1], Data()).settled(can_pin=True).pin_memory is True
    assert made.settled(can_pin=False) is made
    ready = source_from(Stream(3), Data(batched=True))
    assert (ready.is_batched, ready.collate) == (True, default_convert)


def test_a_loader_brings_its_own_settings() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    def begin(worker: int) -> None:
        return None

    loader: DataLoader[Any] = DataLoader(
        TensorDataset(torch.ones(4)),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        prefetch_factor=7,
        collate_fn=collate,
        worker_init_fn=begin,
        multiprocessing_context="spawn",
    )
    made = source_from(loader, Data(shuffle=False, num_workers=2))
    assert (made.shuffle, made.num_workers, made.prefetch_factor) == (True, 2, 7)
    assert (made.collate, made.worker_init_fn) == (collate, begin)
    options = made.loader_options
    assert {key: options[key] for key in ("num_workers", "pin_memory", "prefetch_factor")} == {
        "num_workers": 2,
        "pin_memory": False,
        "prefetch_factor": 7,
    }
    assert options["worker_init_fn"].init is begin
    assert options["multiprocessing_context"] is loader.multiprocessing_context
    assert isinstance(options["generator"], torch.Generator)
    alone = source_from([1], Data()).loader_options
    assert set(alone) == {"num_workers", "pin_memory", "generator"}
    plain: DataLoader[Any] = DataLoader([1, 2])  # type: ignore[arg-type]
    made = source_from(plain, Data(prefetch_factor=3))
    assert (made.prefetch_factor, made.shuffle, made.collate) == (3, False, default_collate)
    assert made.pin_memory is None


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        (RandomSampler([1, 2, 3]), True),
        (SequentialSampler([1, 2, 3]), False),
        (RandomSampler([1, 2, 3], replacement=True), None),
        (RandomSampler([1, 2, 3], num_samples=2), None),
        (WeightedRandomSampler([0.5, 0.5, 1.0], 3), None),
        (type("RandomSampler", (Order,), {})(1, 2, 3), None),
    ],
)
def test_a_sampler_that_only_shuffles_is_replaced_and_another_is_kept(
    sampler: Any, order: bool | None
) -> None:
    loader: DataLoader[Any] = DataLoader([1, 2, 3], sampler=sampler, batch_size=1)  # type: ignore[arg-type]
    made = source_from(loader, Data())
    assert made.shuffle is (order is True)
    assert (made.sampler is None) is (order is not None)
    if made.sampler is not None:
        assert made.sampler.sampler is sampler
        assert not made.sampler.yields_batches
        assert made.epoch_length(4) == len(sampler)


def test_a_batch_sampler_yields_micro_batches_and_no_batching_is_refused() -> None:
    batch_sampler = BatchSampler(range(6), 4, drop_last=False)
    made = source_from(DataLoader(range(6), batch_sampler=batch_sampler), Data())  # type: ignore[arg-type]
    assert made.sampler is not None
    assert made.sampler.yields_batches
    assert made.epoch_length(4) == 8, "a batch counts as a full one"
    assert source_from([1, 2], Data()).epoch_length(4) == 2
    with pytest.raises(ConfigError) as caught:
        source_from(DataLoader([1, 2], batch_size=None), Data())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "DataLoader batch_size = None: takes one item at a time from the dataset and passes it on "
        "unbatched; leave it out; for ready batches pass a stream of them"
    )


@pytest.mark.parametrize(
    ("batch_size", "batched", "is_batched"),
    [
        (2, "auto", False),
        (None, "auto", True),
        (None, True, True),
        (None, False, False),
        (2, False, False),
    ],
)
def test_a_streams_loader_without_a_batch_size_yields_ready_batches(
    batch_size: int | None, batched: Any, is_batched: bool
) -> None:
    loader: DataLoader[Any] = DataLoader(Stream(4), batch_size=batch_size)
    made = source_from(loader, Data(batched=batched))
    assert made.is_batched is is_batched
    assert made.collate is (default_convert if is_batched else default_collate)
    assert (made.length, made.shuffle, made.sampler) == (None, False, None)


def test_what_cannot_be_read_as_data_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        source_from(DataLoader(Stream(4), batch_size=2), Data(batched=True))
    assert str(caught.value) == (
        "DataLoader batch_size = 2: would collate ready batches again (data.batched); use "
        "batch_size=None"
    )
    with pytest.raises(ConfigError) as caught:
        source_from(5, Data(), "val")
    assert str(caught.value) == (
        "val = int: neither a dataset nor an iterable; pass a Dataset, a DataLoader or an iterable"
    )
    with pytest.raises(ConfigError) as caught:
        source_from([], Data(), "val")
    assert str(caught.value) == "val: has no samples; pass a dataset with at least one"
    several = "contains several datasets, but one is expected; join them (torch.utils.data.Concat"
    for data in ({"a": [1]}, [TensorDataset(torch.ones(1))], {0: TensorDataset(torch.ones(1))}):
        with pytest.raises(ConfigError) as caught:
            source_from(data, Data())
        assert str(caught.value).startswith(f"data = {type(data).__name__}: {several}")
    assert source_from({0: 5, 1: 6}, Data()).length == 2
    refuse_one_pass([1], "val")
    refuse_one_pass(Stream(1), "val")
    with pytest.raises(ConfigError) as caught:
        refuse_one_pass(iter([1]), "val")
    assert str(caught.value) == (
        "val = list_iterator: can be read only once, but every evaluation reads it from the "
        "start; pass a dataset, a DataLoader, or an object whose __iter__ starts over"
    )


def test_a_pipeline_that_may_yield_either_must_be_told() -> None:
    class Piped(Stream):
        def __init__(self) -> None:
            super().__init__(1)
            self.pipeline: list[Any] = [DataLoader(Stream(1))]

    with pytest.raises(ConfigError) as caught:
        source_from(Piped(), Data(), "val")
    assert str(caught.value) == (
        "val = Piped: may yield either samples or ready batches; pass the "
        "dataset itself, or set data.batched to true or false"
    )
    assert source_from(Piped(), Data(batched=True)).is_batched is True
    assert source_from(Piped(), Data(batched=False)).is_batched is False


def test_what_is_looked_at_is_the_first_and_the_largest() -> None:
    samples = [torch.ones(n) for n in (2, 5, 3)]
    made = source_from(samples, Data())
    assert [len(each) for each in made.first(2)] == [2, 5]
    assert len(made.first(9)) == 3
    assert made.batch_of_largest(2).shape == (2, 5)
    late = source_from([torch.ones(1)] * 64 + [torch.ones(9)], Data())
    assert late.batch_of_largest(1).shape == (1, 1), "of the first 64"
    stream = source_from(Stream(5), Data())
    assert [int(each) for each in stream.first(2)] == [0, 1]
    assert stream.first_batch(3).tolist() == [0, 1, 2]
    ready = stream_source(3, size=2)
    assert ready.first_batch(9).tolist() == [0, 0]
    assert ready.batch_of_largest(3).tolist() == [0, 0, 0]
    nested = source_from(
        [{"a": [torch.ones(2)], "b": "text"}, {"a": [torch.ones(1)], "b": "x"}], Data()
    )
    assert nested.batch_of_largest(1)["a"][0].shape == (1, 2)


def test_only_tensors_in_memory_are_known_to_draw_nothing() -> None:
    tensors = TensorDataset(torch.ones(2))
    assert source_from(tensors, Data()).draws_nothing
    assert source_from([1], Data()).draws_nothing
    assert source_from(Subset(tensors, [0]), Data()).draws_nothing
    assert not source_from(Subset(Numbers(), [0]), Data()).draws_nothing  # type: ignore[arg-type]
    assert not source_from(Numbers(), Data()).draws_nothing
    own: DataLoader[Any] = DataLoader(tensors, collate_fn=list)
    assert not source_from(own, Data()).draws_nothing
    assert is_stream(Stream(1))
    assert not is_stream(Numbers())
    assert not is_stream(5)
