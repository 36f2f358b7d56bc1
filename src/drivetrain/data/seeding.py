"""Setting the random streams of this process from a key."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.parallel.accelerator import accelerator_of


def seed_model(seed: int, device: torch.device) -> None:
    """Torch's streams on the CPU and on the rank's device: dropout and the like."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        accelerator_of(device).seed(seed)


def seed_data(seed: int) -> None:
    """Torch's, Python's and numpy's streams: whatever a dataset's augmentation may draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the streams go on afterwards as if nothing had been."""
    numpy = sys.modules.get("numpy")
    python, torchs = random.getstate(), torch.get_rng_state()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy is not None:
            numpy.random.set_state(numpys)
