"""The migration pages show the scripts and the results that are there; `after` scripts run."""

from __future__ import annotations

import sys

import pytest

from benchmarks.migrations import PAIRS, SCRIPTS, Pair, losses_of, refreshed

QUICK = ["ddp", "lightning", "hf_trainer"]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_page_is_up_to_date(pair: Pair) -> None:
    page = pair.page.read_text()
    assert "```python" in page
    assert refreshed(page, pair.name) == page


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_the_script_after_the_move_trains(name: str) -> None:
    for library in {"lightning": ["lightning"], "hf_trainer": ["transformers"]}.get(name, []):
        pytest.importorskip(library)
    losses = losses_of((sys.executable,), SCRIPTS / name / "after.py")
    assert losses[-1] < losses[0]
