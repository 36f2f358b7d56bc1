"""The patterns' page shows what was measured; changes to other people's scripts are applied."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.patterns import patching
from benchmarks.patterns.__main__ import PAGE, refreshed
from benchmarks.patterns.compare import Curve, distance, is_rest_of
from benchmarks.patterns.kinds import PATTERNS, Pattern

ORIGINAL = "one\ntwo\nthree\nfour\nfive\n"
CHANGED = "one\n2\n2.5\nfour\nfive\nsix\n"


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> patching.Patch:
    sha256 = hashlib.sha256(ORIGINAL.encode()).hexdigest()
    text = f"{sha256} somebody's numbers\nd2 2\na3 2\n2\n2.5\na5 1\nsix\n"
    (tmp_path / "numbers.rcs").write_text(text)
    monkeypatch.setattr(patching, "PATCHES", tmp_path)
    return patching.read("numbers")


def test_a_change_is_applied(patch: patching.Patch) -> None:
    assert patch.apply(ORIGINAL) == CHANGED
    assert patch.counts == (2, 3)


def test_a_change_is_refused_for_another_file(patch: patching.Patch) -> None:
    with pytest.raises(ValueError, match="not the somebody's numbers that the change was made for"):
        patch.apply(ORIGINAL + "\n")


@pytest.mark.parametrize("file", sorted(patching.PATCHES.glob("*.rcs")), ids=lambda f: f.stem)
def test_every_change_can_be_read(file: Path) -> None:
    gone, came = patching.read(file.stem).counts
    assert gone > 0
    assert came > 0


def test_curves_are_compared_at_every_step_and_metric() -> None:
    one = Curve([4.0, 2.0, 1.0], {"val": 2.0})
    assert distance(one, one) == 0
    assert distance(one, Curve([4.0, 2.0, 1.0], {"val": 1.0})) == 0.5
    assert distance(one, Curve([4.0, 1.5, 1.0], {"val": 2.0})) == 0.25
    with pytest.raises(ValueError, match="3 steps"):
        distance(one, Curve([4.0, 2.0], {"val": 2.0}))


def test_a_resumed_run_is_the_rest_of_the_whole_one() -> None:
    whole = Curve([4.0, 2.0, 1.0], {"val": 2.0})
    assert is_rest_of(Curve([2.0, 1.0], {"val": 2.0}), whole)
    assert not is_rest_of(Curve([2.0, 1.1], {"val": 2.0}), whole)
    assert not is_rest_of(Curve([2.0, 1.0], {"val": 2.1}), whole)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_pattern_has_its_scripts(pattern: Pattern) -> None:
    assert pattern.before.exists()
    assert pattern.after.exists()


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert "DIFFERENT" not in page
    assert refreshed(page) == page
