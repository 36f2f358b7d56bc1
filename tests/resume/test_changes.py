"""A run that is gone on with is the run that was begun, or says what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.changes import CHANGES, Change, observe


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(c, id=c.what, marks=pytest.mark.slow if c.num_ranks > 1 else ())
        for c in CHANGES
    ],
)
def test_a_change_between_attempts(change: Change, tmp_path: Path) -> None:
    seen = observe(change, tmp_path)
    assert seen.happens == change.happens, seen
    if change.happens == "resumed once accepted":
        assert f"--accept-change {change.accept}" in seen.message
