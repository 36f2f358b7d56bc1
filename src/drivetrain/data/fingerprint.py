"""What a dataset holds, in a few words: its length, and a digest of a few of its samples.

Reading every sample would take hours. A few find what happens to people: another folder, another
tokenizer, files in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.data.keys import fold
from drivetrain.data.reading import read_one
from drivetrain.data.seeding import seed_data, undisturbed
from drivetrain.data.sources import Source

_NUM_DRAWN = 4


def content(source: Source) -> str | None:
    """A digest of the first, the last and a few samples between them.

    None where there is nothing to hold against it: a stream cannot be read twice, and some datasets
    give another sample each time they are asked for the same one.
    """
    if source.length is None:
        return None
    drawn = {fold(source.length, index) % source.length for index in range(_NUM_DRAWN)}
    ids = sorted({0, source.length - 1, *drawn})
    with undisturbed():
        first, again = (_digest(source.dataset, ids) for _ in range(2))
    return first if first == again else None


def _digest(dataset: Any, ids: list[int]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for index in ids:
        seed_data(index)  # augmentation draws the same, whenever it is asked
        _add(digest, read_one(dataset, index))
    return digest.hexdigest()


def _add(digest: Any, sample: Any) -> None:
    """Whatever a sample is made of; of what is unknown, only its type."""
    digest.update(type(sample).__name__.encode())
    if isinstance(sample, torch.Tensor):
        digest.update(str((sample.dtype, tuple(sample.shape))).encode())
        if sample.layout is torch.strided:
            whole = sample.detach().cpu().contiguous().reshape(-1)
            digest.update(whole.view(torch.uint8).numpy())
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            _add(digest, key)
            _add(digest, value)
    elif isinstance(sample, (list, tuple)):
        for item in sample:
            _add(digest, item)
    elif isinstance(sample, (bytes, bytearray)):
        digest.update(sample)
    elif isinstance(sample, (str, int, float, complex, bool)):
        digest.update(repr(sample).encode())
    elif hasattr(sample, "tobytes"):  # NumPy's arrays, PIL's images
        digest.update(str((getattr(sample, "shape", None), getattr(sample, "size", None))).encode())
        digest.update(sample.tobytes())
