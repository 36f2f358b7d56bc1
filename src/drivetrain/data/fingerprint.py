"""A dataset's fingerprint: a digest of a few of its samples.

Reading every sample would take hours. A few samples detect common mistakes: a different directory,
a different tokenizer, files in a different order.
"""

from __future__ import annotations

import hashlib
from typing import Any

from drivetrain.data.digest import add
from drivetrain.data.keys import fold
from drivetrain.data.reading import read_one
from drivetrain.data.seeding import seed_data, undisturbed
from drivetrain.data.sources import Source

_NUM_DRAWN = 4


def content(source: Source) -> str | None:
    """Return a digest of the first sample, the last one and a few between them.

    None if it could not be compared: a stream cannot be read twice, and some datasets return a
    different sample each time they are asked for the same one.
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
        seed_data(index)  # augmentation then draws the same numbers each time
        add(digest, read_one(dataset, index))
    return digest.hexdigest()
