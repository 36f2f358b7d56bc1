"""A run that is gone on with is the run that was begun, or says what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.changes import CHANGES, Change, observe


def _marks(change: Change) -> tuple[pytest.MarkDecorator, ...]:
    if change.num_ranks == 1:
        return ()
    in_ci = "fsdp" in change.what
    return (pytest.mark.slow,) if in_ci else (pytest.mark.slow, pytest.mark.long)


@pytest.mark.parametrize(
    "change",
    [pytest.param(c, id=c.what, marks=_marks(c)) for c in CHANGES],
)
def test_a_change_between_attempts(change: Change, tmp_path: Path) -> None:
    seen = observe(change, tmp_path)
    assert seen.happens == change.happens, seen
    if change.happens == "resumed once accepted":
        assert f"--accept-change {change.accept}" in seen.message
