"""What a user passes to fit(): a dataset, a DataLoader or a stream, taken apart once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.ray_rows import RayRows, is_ray_dataset

Collate = Callable[[list[Any]], Any]
_LOOKED_AT = 64


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how they are put together."""

    dataset: Any
    length: int | None
    """None: a stream."""
    shuffle: bool
    collate: Collate = default_collate
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    """None: where the device is not the CPU."""
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None

    def settled(self, *, can_pin: bool) -> Source:
        """With pin_memory decided where the config left it open."""
        return self if self.pin_memory is not None else replace(self, pin_memory=can_pin)

    def first(self, count: int) -> list[Any]:
        """Samples to look at; fewer where there are no more."""
        if self.length is None:
            return list(islice(iter(self.dataset), count))
        return [self.dataset[index] for index in range(min(count, self.length))]

    def batch_of_largest(self, size: int) -> Any:
        """`size` samples, collated, for one who only wants to look.

        All are the largest of the first few: batches of any size are then of one shape, and what
        is planned for it has room for the others.
        """
        return self.collate([self._largest] * size)

    @cached_property
    def _largest(self) -> Any:
        return max(self.first(_LOOKED_AT), key=_num_elements)

    @property
    def draws_nothing(self) -> bool:
        """Whether reading is known not to use random numbers, so that none need be seeded."""
        return self.collate is default_collate and _is_in_memory(self.dataset)

    @property
    def loader_options(self) -> dict[str, Any]:
        """The options of torch's DataLoader that do not decide which samples are read."""
        options: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": bool(self.pin_memory),
        }
        # of its own: a loader draws from it when it is made, and a resumed run makes one more
        options["generator"] = torch.Generator()
        if self.num_workers:
            options["prefetch_factor"] = self.prefetch_factor
            options["worker_init_fn"] = self.worker_init_fn
            options["multiprocessing_context"] = self.multiprocessing_context
        return options


def source_from(data: Any, config: Data, name: str = "data") -> Source:
    """Read the user's object. A DataLoader brings its own collate, workers and shuffling."""
    pin_memory = None if config.pin_memory == "auto" else config.pin_memory
    if is_ray_dataset(data):
        data = RayRows(data)
    if isinstance(data, DataLoader):
        dataset = data.dataset
        return Source(
            dataset=dataset,
            length=_length(dataset, name),
            shuffle=_shuffles(data),
            collate=data.collate_fn or default_collate,
            num_workers=max(config.num_workers, data.num_workers),
            prefetch_factor=data.prefetch_factor or config.prefetch_factor,
            pin_memory=data.pin_memory or pin_memory,
            worker_init_fn=data.worker_init_fn,
            multiprocessing_context=data.multiprocessing_context,
        )
    if not isinstance(data, Dataset) and not hasattr(data, "__getitem__") and not is_stream(data):
        raise ConfigError(
            [
                Problem(
                    name,
                    "neither a dataset nor something to iterate over",
                    "pass a Dataset, a DataLoader or an iterable",
                    type(data).__name__,
                )
            ]
        )
    return Source(
        dataset=data,
        length=_length(data, name),
        shuffle=config.shuffle,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        pin_memory=pin_memory,
    )


def _num_elements(sample: Any) -> int:
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, dict):
        return sum(_num_elements(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(_num_elements(value) for value in sample)
    return 0


def is_stream(data: Any) -> bool:
    """Whether samples can only be read in order."""
    return isinstance(data, IterableDataset) or (
        isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    )


def _is_in_memory(dataset: Any) -> bool:
    """Torch's own containers of tensors: their reading is indexing and nothing else."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    return type(dataset) in (TensorDataset, list)


def refuse_one_pass(data: Any, name: str) -> None:
    """A generator is empty from its second reading on. An IterableDataset may begin anew."""
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        rule = "can be read once only, and every evaluation reads it from the beginning"
        remedy = "pass a dataset, a DataLoader, or an object whose __iter__ begins anew"
        raise ConfigError([Problem(name, rule, remedy, type(data).__name__)])


def _length(dataset: Any, name: str) -> int | None:
    if is_stream(dataset):
        return None
    length = len(dataset)
    if length == 0:
        raise ConfigError(
            [Problem(name, "has no samples", "pass a dataset with at least one", has_value=False)]
        )
    return length


def _shuffles(loader: DataLoader[Any]) -> bool:
    """What the loader's sampler does; a sampler of one's own cannot be kept at any world size."""
    sampler: Any = loader.sampler
    if loader.batch_size is None:  # a batch sampler, or a dataset that yields whole batches
        sampler = loader.batch_sampler
    elif isinstance(loader.dataset, IterableDataset):
        return False
    elif isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    elif _is_stock(sampler, RandomSampler) and _draws_each_once(sampler, loader.dataset):
        return True
    elif _is_stock(sampler, SequentialSampler):
        return False
    raise ConfigError(
        [
            Problem(
                "DataLoader sampler",
                "Drivetrain decides which samples make up a step, so that it is the same at any "
                "world size",
                "pass the dataset; weight, filter or group inside it",
                type(sampler).__name__,
            )
        ]
    )


def _is_stock(sampler: Any, kind: type) -> bool:
    """Torch's own, or torchdata's of the same name; a user's may do anything."""
    has_its_name = type(sampler).__name__ == kind.__name__
    return has_its_name and type(sampler).__module__.startswith(("torch.", "torchdata."))


def _draws_each_once(sampler: RandomSampler, dataset: Any) -> bool:
    return not sampler.replacement and sampler.num_samples == len(dataset)
