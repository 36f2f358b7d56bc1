"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.config.schema import Checkpoint
from tests.checkpoint.parts import world


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Checkpointer]:
    made = Checkpointer(LocalStorage(tmp_path), Checkpoint(keep_last=9), world(), "ddp")
    made.claim(0)
    yield made
    made.close()
