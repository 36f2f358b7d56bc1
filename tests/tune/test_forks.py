"""Forks of real runs: equal to the bit, kept from retention, and whole after any kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.testing import run_ranks
from tests.tune.forks import killed_forks, many_forks


@pytest.mark.slow
def test_forks_on_two_ranks_begin_as_their_donors_went_on(tmp_path: Path) -> None:
    for forks in run_ranks(many_forks, 2, 300, args=(str(tmp_path), 2)):
        assert len(forks) == 4
        for each in forks:
            assert each["changed"]
            assert each["same"] == ["weights", "gradients' signs", "optimizer", "random state"]
            assert each["pins left"] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills_during_forks(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = killed_forks(tmp_path, 20)
    assert found["kills"] == 20
    assert found["same trials, forks and values"]
    assert (found["forks"], found["pins left"]) == (6, [])
    where = " ".join(found["where"])
    for part in ("journal.write", "pins.pin", "pins.release"):
        assert part in where


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_forks_on_two_ranks(tmp_path: Path) -> None:
    for forks in run_ranks(many_forks, 2, 3000, args=(str(tmp_path), 25)):
        assert len(forks) == 50
        for each in forks:
            assert each["same"][:4] == ["weights", "gradients' signs", "optimizer", "random state"]
            assert each["pins left"] == []
