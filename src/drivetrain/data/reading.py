"""Calls to the user's code that reads data; its errors are annotated with the failing sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from drivetrain.core.errors import blame


def read(dataset: Any, ids: Sequence[int]) -> list[Any]:
    """Return the samples with these ids, in one call if the dataset supports it."""
    name = type(dataset).__name__
    if hasattr(dataset, "__getitems__"):
        try:
            found: list[Any] = dataset.__getitems__(ids)
        except Exception as error:
            blame(error, f"{name}.__getitems__({list(ids)})")
            raise
        return found
    samples: list[Any] = []
    try:
        for i in ids:
            samples.append(dataset[i])
    except Exception as error:
        blame(error, f"{name}.__getitem__({ids[len(samples)]})")
        raise
    return samples


def read_one(dataset: Any, index: int) -> Any:
    """Return one sample."""
    try:
        return dataset[index]
    except Exception as error:
        blame(error, f"{type(dataset).__name__}.__getitem__({index})")
        raise


class ReadDataset(Dataset[Any]):
    """A dataset that is read with `read`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, ids: list[int]) -> list[Any]:
        """Return the samples that torch's loader asks for."""
        return read(self._dataset, ids)


@dataclass(frozen=True)
class Collated:
    """A collate function. A class, so that it can be pickled for data workers not forked."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of samples."""
        try:
            return self.collate(samples)
        except Exception as error:
            name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
            blame(error, f"{name} (collate), given {len(samples)} samples,")
            raise


def in_order(stream: Any) -> Iterator[Any]:
    """Yield the samples of a stream."""
    count = 0
    try:
        for sample in stream:
            yield sample
            count += 1
    except Exception as error:
        blame(error, f"{type(stream).__name__}.__iter__, after {count} samples")
        raise
