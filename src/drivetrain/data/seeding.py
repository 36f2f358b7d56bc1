"""Seeding this process's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.parallel.accelerator import accelerator_of


def seed_data(seed: int) -> None:
    """Seed torch's, Python's and NumPy's generators, which a dataset's augmentation may use."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_model(seed: int, device: torch.device) -> None:
    """Seed these and the rank's device, which dropout uses; a loss may mix samples with NumPy's."""
    seed_data(seed)
    if device.type != "cpu":
        accelerator_of(device).seed(seed)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the state of the random generators at the end of the block."""
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
