"""RayRows: a Ray Data dataset as a stream of rows, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


def is_ray_dataset(data: Any) -> bool:
    """Told by name, so that Ray need not be imported to know."""
    return type(data).__module__.startswith("ray.data.") and hasattr(data, "iter_rows")


class RayRows(IterableDataset[dict[str, Any]]):
    """Reads through Ray Data's own engine.

    Ray hands blocks over as they become ready, unless it is told to keep their order: then the
    n-th row is the same row each time, and a run that goes on after n rows misses and repeats none.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass."""
        self._dataset.context.execution_options.preserve_order = True
        rows: Iterator[dict[str, Any]] = iter(self._dataset.iter_rows())
        return rows
