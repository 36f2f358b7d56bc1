"""`make figures`: which figures are older than the code they speak of, from what git remembers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_RESULTS = "benchmarks/results"
_PACKAGE = "src/drivetrain"
_NOT_TEXT_ONLY = ["--invert-grep", "--grep=^Text-only: "]
"""Without commits whose trailer says that they changed comments, docstrings or messages alone."""


@dataclass(frozen=True)
class Figure:
    """A folder of results, when it was committed, and what has happened to its code since."""

    name: str
    target: str
    commit: str
    date: str
    num_changes: int
    """Commits since that touched the code."""
    lines_changed: int
    pages: tuple[str, ...]
    """That refer to it."""

    def __str__(self) -> str:
        since = (
            f"{self.num_changes:3d} commits, {self.lines_changed:6,d} lines since"
            if self.num_changes
            else "up to date"
        )
        when = f"{self.name:18s} {self.commit}  {self.date}"
        return f"{when}  {since:32s} make {self.target:16s} {', '.join(self.pages) or '-'}"


def has_history() -> bool:
    """Whether git knows when results were recorded: not in an archive, nor in a shallow clone."""
    try:
        return _git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def read_list() -> Mapping[str, Mapping[str, Any]]:
    """figures.yaml: by folder, `make` and `code`."""
    listed: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
        (ROOT / "benchmarks/figures.yaml").read_text()
    )
    return listed


def code_of(entry: Mapping[str, Any]) -> list[str]:
    """Paths from the root."""
    return [f"{_PACKAGE}/{path}" for path in entry["code"]]


def lines_changed(numstat: str) -> int:
    """Added and removed, from `git log --numstat`."""
    return sum(int(a) + int(b) for a, b in re.findall(r"^(\d+)\t(\d+)\t", numstat, re.MULTILINE))


def figures() -> list[Figure]:
    """The most outdated first."""
    found = [_figure(name, entry) for name, entry in read_list().items()]
    return sorted(found, key=lambda figure: -figure.lines_changed)


def _figure(name: str, entry: Mapping[str, Any]) -> Figure:
    commit, date = newest(_recorded(name), entry.get("again"))
    since = [*_NOT_TEXT_ONLY, f"{commit}..HEAD", "--", *code_of(entry)]
    return Figure(
        name=name,
        target=entry["make"],
        commit=commit,
        date=date,
        num_changes=int(_git("rev-list", "--count", *since)),
        lines_changed=lines_changed(_git("log", "--numstat", "--format=", *since)),
        pages=_pages_that_show(name),
    )


def _recorded(name: str) -> str:
    """The commit of the results."""
    results = ["--", f"{_RESULTS}/{name}"]
    return _git("log", "-1", "--format=%H", *_NOT_TEXT_ONLY, *results).strip()


def newest(recorded: str, again: str | None) -> tuple[str, str]:
    """Of the commit of the results and the one at which they came out the same again; its date."""
    among = [recorded, again] if again else [recorded]
    commit, date = _git("log", "-1", "--no-walk", "--format=%h %as", *among).split()
    return commit, date


def _pages_that_show(name: str) -> tuple[str, ...]:
    mention = re.compile(rf"(?:{_RESULTS}/|<!-- table: ){re.escape(name)}\b(?!-)")
    pages: Sequence[Path] = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return tuple(str(page.relative_to(ROOT)) for page in pages if mention.search(page.read_text()))


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words],  # noqa: S607 - whichever git the developer has
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    for figure in figures():
        print(figure)
