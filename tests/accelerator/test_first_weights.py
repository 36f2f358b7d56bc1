"""On devices a run starts with the weights it starts with on the CPU, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drivetrain.data.keys import INIT, fold
from drivetrain.testing import run_ranks
from tests.accelerator.layouts import GROUPS
from tests.ranks.models import task_of
from tests.ranks.test_first_weights import (
    digest_of,
    save_in_two_files,
    start_from_files,
    start_layouts,
)


def test_every_layout_starts_from_pretrained_files(tmp_path: Path) -> None:
    expected = save_in_two_files(tmp_path)
    args = (str(tmp_path / "runs"), str(tmp_path))
    found = run_ranks(start_from_files, 4, 300, args, GROUPS["both"])[0]
    assert found == dict.fromkeys(found, expected)


@pytest.mark.long
def test_every_layout_starts_from_the_weights_of_plain_torch(tmp_path: Path) -> None:
    task, _ = task_of("gpt")
    torch.manual_seed(fold(42, INIT))
    expected = digest_of(task.model().state_dict())
    found = run_ranks(start_layouts, 4, 600, (str(tmp_path),), GROUPS["both"])[0]
    assert {by["sequential"] for by in found.values()} == {expected}
    assert len({by["keyed"] for by in found.values() if "keyed" in by}) == 1
