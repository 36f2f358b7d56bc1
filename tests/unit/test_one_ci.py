"""CI is defined once, by `make ci`: workflow, .ci/run and CONTRIBUTING name the same targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def targets() -> set[str]:
    """All that `make` can be told here."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def ci_targets() -> set[str]:
    """What `make ci` runs."""
    found = re.search(r"^ci: .*\n((?:\t\$\(MAKE\) .*\n)+)", _makefile(), re.MULTILINE)
    assert found is not None
    words = set(re.findall(r"(?<![-=])\b[a-z][a-z-]+\b(?!=)", found[1]))
    return words & targets() - {"accelerator"}  # on-device builds it, too


def _makefile() -> str:
    return (ROOT / "Makefile").read_text()


def _played_pages() -> set[str]:
    """The targets that play a page's commands, which one rule makes of a list of pages."""
    found = re.search(r"^PLAYED := (.+)$", _makefile(), re.MULTILINE)
    assert found is not None
    return {f"played-{page}" for page in found[1].split()}


def _workflow_targets() -> set[str]:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    words: set[str] = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            command = step.get("run", "")
            if command == "make ${{ matrix.target }}":
                words |= set(matrix["target"])
            elif command:
                words.add(command.split()[1])
    return words


def test_the_workflow_runs_what_make_ci_runs() -> None:
    assert _workflow_targets() == ci_targets() | {"setup"}


def test_ci_run_is_setup_and_make_ci() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == [
        "make setup EXTRA=dev-all",
        "make ci",
    ]


def test_contributing_names_every_target_of_ci_and_none_that_is_missing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    words = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert ci_targets() <= words
    assert words <= targets() | _played_pages()


def test_the_hooks_are_targets() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"] for hook in hooks} == {"make lint", "make types", "make layers"}


def test_every_target_is_phony_or_a_file() -> None:
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", _makefile(), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].replace("\\\n", " ").split()) == targets()
