"""The same weights, bit for bit, at any number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

from drivetrain.testing import run_ranks
from tests.gpu_smoke.devices import backend, fits, left_s
from tests.gpu_smoke.rows import Row, judged
from tests.ranks.training import train_gpt

STEPS = 20


def rows() -> Iterator[Row]:
    first = _digest(1)
    again = _digest(1)
    yield judged("1 rank, twice", again == first, f"{first}, {again[:16]}")
    for ranks in (2, 3, 4, 8):
        if fits(ranks):
            found = _digest(ranks)
            yield judged(f"{ranks} ranks", found == first, found)


def _digest(world_size: int) -> str:
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        found = set(run_ranks(digest, world_size, left_s(), (folder,), backend()))
    return ", ".join(sorted(found))  # one, unless ranks differ


def digest(folder: str) -> str:
    """With dropout, lengths that vary, accumulation and clipping."""
    settings = {"reproducibility": "bitwise", "max_steps": STEPS}
    return train_gpt(folder, with_hash=True, **settings)[2]
