"""Trials that cannot fit never begin, and are no failures. The real planner, in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import DrivetrainError
from drivetrain.plan.prospect import Prospect
from drivetrain.tune import decide, rows
from drivetrain.tune.driver import Driver
from drivetrain.tune.fit import Planner
from drivetrain.tune.journal import read_journal
from drivetrain.tune.settings import Settings, Study, open_study
from drivetrain.tune.space import Choice, Space
from tests.tune.instant import instant

pytest.importorskip("optuna")
LONG = (pytest.mark.slow, pytest.mark.long)
SCRIPT = Path(__file__).parents[1] / "scripts" / "tuned.py"
SMALL_DEVICE = """
device: {memory_gib: 0.01, peak_tflops: {fp32: 1}, memory_gb_per_s: 10, is_accelerator: false}
devices_per_node: 1
"""
BATCH, RATE = "global_batch_size", "optimization.learning_rate"


def study(tmp_path: Path, batches: tuple[int, ...], **changes: Any) -> Study:
    file = tmp_path / "cluster.yaml"
    file.write_text(SMALL_DEVICE)
    space = Space({BATCH: Choice(batches), RATE: Choice((0.1, 0.2))})
    given: dict[str, Any] = {"num_trials": 2 * len(batches), "sampler": "grid"}
    given |= {"cluster": str(file), **changes}
    words = ("micro_batch_size=auto",)
    return open_study(tmp_path / "study", Settings(str(SCRIPT), words, **given), space)


def told(made: Study) -> Planner:
    planner = Planner(made)
    planner._known[f'{{"{BATCH}": 8}}'] = Prospect(1e6, 1e9)
    planner._known[f'{{"{BATCH}": {2**20}}}'] = Prospect(3e9, 1e9)
    return planner


@pytest.mark.parametrize("kind", ["told", pytest.param("asked", marks=LONG)])
def test_what_cannot_fit_is_dropped_before_it_starts(tmp_path: Path, kind: str) -> None:
    made, said = study(tmp_path, (8, 2**20)), list[str]()
    planner, runner = told(made) if kind == "told" else Planner(made), instant(made)
    best = Driver(made, runner, 2, said.append, planner).run()
    assert best is not None
    assert [work.trial for work in runner.started] == [0, 1], "the two of the small batch"
    found = rows.rows_of(made)
    assert [row.state for row in found] == ["done", "done", "too large", "too large"]
    limit = "953.7 MiB" if kind == "told" else "9.9 MiB"
    assert f"iB per rank; only {limit} is available on " in found[2].reason
    assert len(planner._known) == 2, "another learning rate is no other question"
    assert any(line.startswith("trial 2: too large: needs ") for line in said)
    state = read_journal(made.path)
    assert all(decide.is_over(made.settings, state, trial) for trial in range(4))
    again = instant(made)
    Driver(made, again, 2, said.append, Planner(made)).run()
    assert again.started == [], "it is in the journal"


def test_a_study_in_which_nothing_fits_ends_and_says_why(tmp_path: Path) -> None:
    made = study(tmp_path, (2**20,))
    planner = Planner(made)
    planner._known[f'{{"{BATCH}": {2**20}}}'] = Prospect(3e9, 1e9)
    with pytest.raises(DrivetrainError, match=r"all of the first 2 trials are too large: needs "):
        Driver(made, instant(made), 1, planner=planner).run()


def test_what_nobody_can_tell_is_started_and_said(tmp_path: Path) -> None:
    made, said = study(tmp_path, (8,)), list[str]()
    planner = Planner(made, said.append)
    planner._known[f'{{"{BATCH}": 8}}'] = Prospect(
        unknown="the planner does not support loss_parallel"
    )
    runner = instant(made)
    Driver(made, runner, 1, said.append, planner).run()
    assert len(runner.started) == 2
    assert [line for line in said if "support loss_parallel); all are started" in line] == said[1:2]


def test_rivals_of_one_that_was_dropped_are_judged_without_it(tmp_path: Path) -> None:
    made = study(tmp_path, (8, 2**20), rungs=(2,), factor=2, generation=4)
    runner = instant(made)
    Driver(made, runner, 4, planner=told(made)).run()
    assert sorted(runner.started) == [decide.Work(t, r) for t in (0, 1) for r in (0, 1)]
