"""Every public name can be loaded, is documented, and stands in the reference."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import drivetrain

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
NAMES = [name for name in drivetrain.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(drivetrain, name)
    assert inspect.getdoc(value)
    assert f".{name}\n" in REFERENCE
    members = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
    ours = [(each, of) for each, of in members if of.__module__.startswith("drivetrain")]
    own = [each for each, _ in ours if not each.startswith("_")]
    assert [each for each in own if not inspect.getdoc(getattr(value, each))] == []


def test_nothing_else_is_offered() -> None:
    assert sorted(drivetrain.__all__) == dir(drivetrain)
