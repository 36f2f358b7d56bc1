"""Fixtures of the tests of data."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data._utils import worker as worker_module
from torch.utils.data._utils.worker import WorkerInfo

from tests.data.parts import Stream


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as the second of three loader processes."""
    made = WorkerInfo(id=1, num_workers=3, seed=7, dataset=Stream(1))
    monkeypatch.setattr(worker_module, "_worker_info", made)
    return made
