from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# These tests need the device in every process, theirs included: `make on-device` provides it.
HAS_DEVICE = find_spec("sim_device") is not None
collect_ignore_glob = [] if HAS_DEVICE else ["test_*.py"]


@pytest.fixture(autouse=True)
def _free_of_charge() -> Iterator[None]:
    """A test that sets costs leaves none behind."""
    yield
    import torch

    torch.get_device_module("sim").reset_costs()
