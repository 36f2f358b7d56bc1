"""On devices a run starts with the weights it starts with on the CPU, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.layouts import GROUPS
from tests.ranks.test_first_weights import check_first_weights, check_pretrained


def test_every_layout_starts_from_pretrained_files(tmp_path: Path) -> None:
    check_pretrained(tmp_path, GROUPS["both"])


@pytest.mark.long
def test_every_layout_starts_from_the_weights_of_plain_torch(tmp_path: Path) -> None:
    check_first_weights(tmp_path, GROUPS["both"])
