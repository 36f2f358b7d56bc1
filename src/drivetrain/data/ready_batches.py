"""Ready batches: helpers for streams that yield whole batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.core.errors import ConfigError, Problem


def num_samples_in(batch: Any) -> int:
    """Return the size of the first dimension in a batch; ConfigError if there is none."""
    size = _size(batch)
    if size is None:
        raise ConfigError(
            [
                Problem(
                    "data.batched",
                    f"a batch of type {type(batch).__name__} contains nothing whose first "
                    "dimension counts samples",
                    "let the stream yield tensors, arrays or lists in dicts, lists or tuples",
                    True,
                )
            ]
        )
    return size


def check_sizes(sizes: list[int], micro_batch_size: int, *, is_first: bool) -> None:
    """ConfigError if a ready batch exceeds a micro-batch, or if all of the first are smaller."""
    largest = max(sizes)
    if largest > micro_batch_size or (is_first and largest < micro_batch_size):
        raise ConfigError(
            [
                Problem(
                    "micro_batch_size",
                    f"the stream yields ready batches of {largest} samples, and each is a "
                    "micro-batch",
                    f"set micro_batch_size={largest}",
                    micro_batch_size,
                )
            ]
        )


def first_sample(batch: Any) -> Any:
    """Return the first sample of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch[0]
    if isinstance(batch, Mapping):
        return {key: first_sample(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(first_sample(value) for value in batch))
    if isinstance(batch, list | tuple) and _holds_columns(batch):
        return type(batch)(first_sample(value) for value in batch)
    return batch[0]


def _size(batch: Any) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, list | tuple):
        if not _holds_columns(batch):
            return len(batch)  # a column of strings or numbers
        parts = list(batch)
    else:
        return None
    return next((size for size in map(_size, parts) if size is not None), None)


def _holds_columns(batch: Any) -> bool:
    return any(hasattr(part, "shape") or isinstance(part, Mapping | list | tuple) for part in batch)
