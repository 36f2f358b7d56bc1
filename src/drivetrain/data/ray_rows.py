"""RayRows: a Ray Data dataset as a stream of rows, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


def is_ray_dataset(data: Any) -> bool:
    """True for a Ray Data dataset; checked by name, so that Ray need not be imported."""
    return type(data).__module__.startswith("ray.data.") and hasattr(data, "iter_rows")


class RayRows(IterableDataset[dict[str, Any]]):
    """A stream of rows, read through Ray Data's own engine.

    By default, Ray yields blocks as they become ready. Here it must preserve their order, so that
    the n-th row is always the same, and a run that resumes after n rows misses and repeats none.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read all rows once."""
        self._dataset.context.execution_options.preserve_order = True
        rows: Iterator[dict[str, Any]] = iter(self._dataset.iter_rows())
        return rows
