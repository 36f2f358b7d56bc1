"""Source: the dataset, DataLoader or stream that a user passes to fit(), in one form."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    default_convert,
)

from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.ray_rows import RayRows, is_ray_dataset
from drivetrain.data.ready_batches import first_sample
from drivetrain.data.samplers import UserSampler

Collate = Callable[[list[Any]], Any]
_LOOKED_AT = 64


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how they are loaded and collated."""

    dataset: Any
    length: int | None
    """None: a stream."""
    shuffle: bool
    collate: Collate = default_collate
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool | None = None
    """None: pin memory if the device is not the CPU."""
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    is_batched: bool = False
    """Whether this is a stream of ready batches, each a micro-batch."""
    sampler: UserSampler | None = None
    """The user's own sampler, in place of `shuffle`."""
    why_in_this_order: str = ""
    """What decides `shuffle` in place of the config's `data.shuffle`; empty if nothing does."""
    loader_batch_size: int | None = None
    """The DataLoader's own, which is not used; None without one."""
    loader_drops_last: bool = False
    """Whether the DataLoader has drop_last, which is not used."""
    loader_has_generator: bool = False
    """Whether the DataLoader would shuffle with its own generator, which is not used."""

    def epoch_length(self, micro_batch_size: int) -> int | None:
        """Return the samples in an epoch, counting each batch of a batch sampler as full."""
        if self.sampler is None:
            return self.length
        return self.sampler.length * (micro_batch_size if self.sampler.yields_batches else 1)

    def settled(self, *, can_pin: bool) -> Source:
        """Return a copy with pin_memory decided, if the config left it open."""
        return self if self.pin_memory is not None else replace(self, pin_memory=can_pin)

    def first(self, count: int) -> list[Any]:
        """Return up to `count` samples for inspection."""
        if self.length is None:
            return list(islice(iter(self.dataset), count))
        return [self.dataset[index] for index in range(min(count, self.length))]

    def batch_of_largest(self, size: int) -> Any:
        """Return a collated batch of `size` samples for planning.

        It repeats the largest of the first few samples, so that batches of any size have one shape,
        and a plan made for it also fits smaller samples.
        """
        if self.is_batched:
            return default_collate([first_sample(self.collate(self._largest))] * size)
        return self.collate([self._largest] * size)

    def first_batch(self, size: int) -> Any:
        """Return a micro-batch for inspection."""
        return self.collate(self.first(1)[0] if self.is_batched else self.first(size))

    @cached_property
    def _largest(self) -> Any:
        return max(self.first(_LOOKED_AT), key=_num_elements)

    @property
    def draws_nothing(self) -> bool:
        """True if reading is known to use no random numbers, so no seeding is needed."""
        return self.collate is default_collate and _is_in_memory(self.dataset)

    @property
    def loader_options(self) -> dict[str, Any]:
        """The options for torch's DataLoader that do not affect which samples are read."""
        options: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": bool(self.pin_memory),
        }
        # its own generator: a loader draws from it when created, and a resumed run creates one more
        options["generator"] = torch.Generator()
        if self.num_workers:
            options["prefetch_factor"] = self.prefetch_factor
            options["worker_init_fn"] = _BeginWorker(self.worker_init_fn)
            options["multiprocessing_context"] = self.multiprocessing_context
        return options


@dataclass(frozen=True)
class _BeginWorker:
    """Begins a loader process. A terminal's Ctrl-C reaches it too, but the rank ends it."""

    init: Callable[[int], None] | None
    """The user's."""

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.init is not None:
            self.init(worker)


def source_from(data: Any, config: Data, name: str = "data") -> Source:
    """Convert the user's data to a Source. A DataLoader keeps its collate, workers and shuffling.

    ConfigError if it is not something to train on.
    """
    pin_memory = None if config.pin_memory == "auto" else config.pin_memory
    if is_ray_dataset(data):
        data = RayRows(data)
    _refuse_several(data, name)
    if isinstance(data, DataLoader):
        dataset = data.dataset
        length = _length(dataset, name)
        is_batched = length is None and _yields_batches(data, config)
        order = _order_of(data)
        return Source(
            dataset=dataset,
            length=length,
            shuffle=order is True,
            sampler=order if isinstance(order, UserSampler) else None,
            why_in_this_order=_why(order, is_stream=length is None),
            loader_batch_size=data.batch_size,
            loader_drops_last=data.drop_last,
            loader_has_generator=order is True and _has_generator(data),
            collate=_collate(data, is_batched=is_batched),
            is_batched=is_batched,
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
                    "neither a dataset nor an iterable",
                    "pass a Dataset, a DataLoader or an iterable",
                    type(data).__name__,
                )
            ]
        )
    length = _length(data, name)
    is_batched = length is None and _is_batched_stream(data, config, name)
    return Source(
        dataset=data,
        length=length,
        shuffle=config.shuffle and length is not None,
        why_in_this_order=_why(order=False, is_stream=True) if length is None else "",
        collate=default_convert if is_batched else default_collate,
        is_batched=is_batched,
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
        pin_memory=pin_memory,
    )


def _refuse_several(data: Any, name: str) -> None:
    """Refuse several datasets in one; samples in a list or under integer keys are allowed."""
    inside: list[Any] = []
    if isinstance(data, Mapping):
        inside = list(data.values())
    elif isinstance(data, (list, tuple)):
        inside = list(data[:1])
    is_several = bool(inside) and isinstance(inside[0], (Dataset, DataLoader))
    if is_several or (isinstance(data, Mapping) and any(isinstance(key, str) for key in data)):
        rule = "contains several datasets, but one is expected"
        remedy = (
            "join them (torch.utils.data.ConcatDataset), or pick one; to evaluate on several, pass "
            'fit(train, {"news": news, "web": web})'
        )
        raise ConfigError([Problem(name, rule, remedy, type(data).__name__)])


def _yields_batches(loader: DataLoader[Any], config: Data) -> bool:
    """True if a stream's loader passes on ready batches."""
    if loader.batch_size is not None and config.batched is True:
        rule = "would collate ready batches again (data.batched)"
        raise ConfigError(
            [Problem("DataLoader batch_size", rule, "use batch_size=None", loader.batch_size)]
        )
    return loader.batch_size is None if config.batched == "auto" else config.batched


def _collate(loader: DataLoader[Any], *, is_batched: bool) -> Collate:
    """Return the user's collate function, or the default for the kind of data."""
    own: Collate | None = loader.collate_fn
    if own not in (None, default_collate, default_convert):
        return own
    return default_convert if is_batched else default_collate


def _is_batched_stream(data: Any, config: Data, name: str) -> bool:
    """True if a stream yields ready batches; ConfigError for WebDataset's loaders (either way)."""
    stages = getattr(data, "pipeline", None)
    if config.batched == "auto" and isinstance(stages, list) and isinstance(stages[0], DataLoader):
        rule = "may yield either samples or ready batches"
        remedy = "pass the dataset itself, or set data.batched to true or false"
        raise ConfigError([Problem(name, rule, remedy, type(data).__name__)])
    return config.batched is True


def _num_elements(sample: Any) -> int:
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, dict):
        return sum(_num_elements(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(_num_elements(value) for value in sample)
    return 0


def is_stream(data: Any) -> bool:
    """True if samples can only be read in order."""
    return isinstance(data, IterableDataset) or (
        isinstance(data, Iterable) and not hasattr(data, "__getitem__")
    )


def _is_in_memory(dataset: Any) -> bool:
    """True for torch's own containers of tensors, whose reading is only indexing."""
    if type(dataset) is Subset:
        return _is_in_memory(dataset.dataset)
    return type(dataset) in (TensorDataset, list)


def refuse_one_pass(data: Any, name: str) -> None:
    """Refuse a generator, which is empty when read again. An IterableDataset may start over."""
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        rule = "can be read only once, but every evaluation reads it from the start"
        remedy = "pass a dataset, a DataLoader, or an object whose __iter__ starts over"
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


def _order_of(loader: DataLoader[Any]) -> bool | UserSampler:
    """Return whether a loader shuffles each sample once, or a sampler that does otherwise."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return False
    if loader.batch_sampler is None:
        rule = "takes one item at a time from the dataset and passes it on unbatched"
        remedy = "leave it out; for ready batches pass a stream of them"
        raise ConfigError([Problem("DataLoader batch_size", rule, remedy, None)])
    if loader.batch_size is None:
        return UserSampler.of(loader.batch_sampler, yields_batches=True)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if _is_stock(sampler, RandomSampler) and _draws_each_once(sampler, loader.dataset):
        return True
    if _is_stock(sampler, SequentialSampler):
        return False
    return UserSampler.of(sampler, yields_batches=False)


def _has_generator(loader: DataLoader[Any]) -> bool:
    own = loader.generator, getattr(loader.sampler, "generator", None)
    return any(generator is not None for generator in own)


def _why(order: bool | UserSampler, *, is_stream: bool) -> str:
    """Return why samples come in their order, if the config has no say in it."""
    if is_stream:
        return "a stream is read in its own order"
    if isinstance(order, UserSampler):
        return "the DataLoader has its own sampler"
    return f"the DataLoader {'shuffles' if order else 'does not shuffle'}"


def _is_stock(sampler: Any, kind: type) -> bool:
    """True for torch's own sampler, or torchdata's of the same name; not for subclasses."""
    has_its_name = type(sampler).__name__ == kind.__name__
    return has_its_name and type(sampler).__module__.startswith(("torch.", "torchdata."))


def _draws_each_once(sampler: RandomSampler, dataset: Any) -> bool:
    return not sampler.replacement and sampler.num_samples == len(dataset)
