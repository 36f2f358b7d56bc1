"""500 inputs, as CI runs them; `make fuzz` runs 20,000."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.campaign import campaign


def test_inputs_that_nobody_wrote(tmp_path: Path) -> None:
    assert campaign(tmp_path, 500) >= 500
