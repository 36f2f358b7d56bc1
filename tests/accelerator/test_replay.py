"""On a device too, one flipped bit in one gradient is found, and the rank is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.testing import run_ranks
from tests.accelerator.layouts import GROUPS
from tests.ranks.test_replay import check, two_ranks


@pytest.mark.timeout(240)
def test_replay_on_the_device(tmp_path: Path) -> None:
    check(run_ranks(two_ranks, 2, 200, (str(tmp_path),), GROUPS["both"]))
