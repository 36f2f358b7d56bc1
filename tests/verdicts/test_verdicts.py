"""Planted faults on real ranks, one seed of those that matter most; `make verdicts` runs all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.diagnose.finding import Finding
from tests.verdicts.faults import FAULTS, Plant, score
from tests.verdicts.running import Stage, run_planted

QUICK = (
    "sleep_before_collective",
    "skipped_collective",
    "data_worker_stuck",
    "deadlock",
    "worker_exits_0",
    "crash",
    "out_of_memory",
    "cannot_allocate",
    "nan_in_module",
    "nan_input",
)
QUICKEST = ("sleep_before_collective", "crash")
LATEST_S = 10.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in QUICKEST else pytest.param(n, marks=pytest.mark.long) for n in QUICK]
)
def test_the_verdict_names_what_was_planted(name: str, stage: Stage, tmp_path: Path) -> None:
    plant = Plant.draw(name, seed=0)
    outcome = run_planted(plant, tmp_path / "planted", stage)
    assert outcome.exit_code, outcome.output
    scored = score(plant, outcome.findings)
    assert scored.is_right, (plant, scored, outcome.findings, outcome.output)
    if FAULTS[name].hangs:
        assert outcome.late_s is not None
        assert outcome.late_s < LATEST_S
    if name != "crash":  # its traceback is there already
        assert outcome.findings[0].what in outcome.output


@pytest.mark.slow
@pytest.mark.long
def test_a_sample_that_is_not_finite_is_named(stage: Stage, tmp_path: Path) -> None:
    plant = Plant.draw("nan_input", seed=1)
    outcome = run_planted(plant, tmp_path / "planted", stage)
    index = (tmp_path / "planted" / "told").read_text()
    assert f"sample ids: {index}" in outcome.findings[0].evidence


@pytest.mark.slow
@pytest.mark.long  # a machine with other work on it is a finding of its own
def test_nothing_is_found_in_a_clean_run(stage: Stage, tmp_path: Path) -> None:
    outcome = run_planted(Plant.draw("clean", seed=0), tmp_path / "clean", stage)
    assert outcome.exit_code == 0
    assert outcome.findings == list[Finding]()
