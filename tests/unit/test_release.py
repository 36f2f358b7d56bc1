"""A version is said in three places; they agree."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from drivetrain import __version__

ROOT = Path(__file__).parents[2]


def test_changelog_and_citation_have_this_version_and_its_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert sections[0] == ("Unreleased", "")
    assert sections[1] == (__version__, str(citation["date-released"]))
    assert citation["version"] == __version__
