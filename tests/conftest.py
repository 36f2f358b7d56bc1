from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from drivetrain.config import script_reads

# Timings are the machine's affair; the time limit of a test is pytest's.
settings.register_profile("drivetrain", deadline=None)
settings.load_profile("drivetrain")


@pytest.fixture(autouse=True)
def _leave_nothing(no_leaks: None) -> None:
    """Every test of this project is held to it."""


@pytest.fixture(autouse=True)
def _nothing_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keys a script has read is known for a process; tests share one."""
    monkeypatch.setattr(script_reads, "_read", set())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Ranks run on one thread each; a single process compared with them does too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, object]:
    """Config for a run that writes into the test's own directory and says nothing."""
    return {"output_dir": str(tmp_path), "record": {"progress": "none", "sinks": []}}
