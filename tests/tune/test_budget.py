"""A budget: what begins under it, what ends beside it, how a study goes on with a larger one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import tune as cli
from drivetrain.core.errors import ConfigError
from drivetrain.tune import budget, decide
from drivetrain.tune.budget import Budget
from drivetrain.tune.decide import Work
from drivetrain.tune.driver import Driver
from drivetrain.tune.journal import Asked, Ended, State, read_journal
from drivetrain.tune.meter import price_per_device_hour
from drivetrain.tune.settings import Settings, Study, load_study, open_study
from drivetrain.tune.space import Float, Space
from tests.tune.instant import Instant, instant

pytest.importorskip("optuna")
SPACE = Space({"optimization.learning_rate": Float(1e-3, 1e-1)})


def study(path: Path, **changes: Any) -> Study:
    given: dict[str, Any] = {"num_trials": 12, "generation": 4, "sampler": "random"}
    return open_study(path, Settings("train.py", (), **{**given, **changes}), SPACE)


def drive(made: Study, num_parallel: int, each_h: float = 1.0) -> Instant:
    """Every rung takes as long."""
    runner = instant(made)

    def spent(_: Asked, rung: int) -> float:
        return each_h * (rung + 1)

    Driver(made, runner, num_parallel, spent_by=spent).run()
    return runner


@pytest.mark.parametrize("num_parallel", [1, 3])
def test_nothing_begins_that_would_exceed_it(tmp_path: Path, num_parallel: int) -> None:
    made = study(tmp_path, budget="5.5h")
    assert len(drive(made, num_parallel).started) == 5
    assert budget.spent(read_journal(tmp_path)) == 5.0
    assert len(read_journal(tmp_path).asked) == 5, "none is asked for that cannot begin"


def test_what_runs_is_counted_with_what_it_will_take() -> None:
    state = State()
    for trial in range(4):
        state.take(Asked(trial, {}))
    state.take(Ended(0, 0, "done", 4, 0.5, spent=2.0))
    state.take(Ended(0, 1, "done", 8, 0.5, spent=5.0))
    state.take(Ended(1, 0, "failed", spent=1.0))
    assert budget.spent(state) == 6.0, "a trial's own account runs over its rungs; failures cost"
    assert (budget.expected(state, 0), budget.expected(state, 1)) == (2.0, 3.0)
    assert budget.affords(Budget(8.0, "h"), state, [], 0)
    assert not budget.affords(Budget(8.0, "h"), state, [Work(2, 0)], 0)
    assert not budget.affords(Budget(8.0, "h"), state, [], 1)
    assert budget.affords(Budget(6.1, "h"), state, [], 2), "what nobody has taken is tried"
    assert not budget.affords(Budget(6.0, "h"), state, [], 2), "nothing is left"


def test_promotions_wait_and_a_larger_budget_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"rungs": (4,), "factor": 2, "num_trials": 4}
    made = study(tmp_path / "a", budget="4h", **told)
    assert drive(made, 2).started == [Work(trial, 0) for trial in range(4)]
    state = read_journal(made.path)
    assert decide.ready(made.settings, state) == [Work(0, 1), Work(1, 1)]
    cli._say_if_more(made.settings, state)
    cli.ls(str(made.path))
    said = capsys.readouterr().out
    assert "2 wait to continue, 0 were not started" in said
    assert "spent 4 of 4 device-hours" in said
    larger = study(tmp_path / "a", budget="9h", **told)
    assert drive(larger, 2).started == [Work(0, 1), Work(1, 1)]
    whole = study(tmp_path / "b", **told)
    drive(whole, 2)
    ends = {at: replace(e, spent=None) for at, e in read_journal(larger.path).ended.items()}
    plain = {at: replace(e, spent=None) for at, e in read_journal(whole.path).ended.items()}
    assert ends == plain, "the pause has changed nothing"


def test_what_was_begun_when_the_driver_died_is_trained_to_its_end(tmp_path: Path) -> None:
    made = study(tmp_path, budget="2h")
    drive(made, 1)
    over = study(tmp_path, budget="1h")
    runner = instant(over)
    runner.started.append(Work(1, 0))
    runner.asked[1] = read_journal(tmp_path).asked[1]
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    (tmp_path / "journal.jsonl").write_text("\n".join([*lines[:3], ""]))  # trial 1 runs
    Driver(over, runner, 1, spent_by=lambda *_: 1.0).run()
    assert (1, 0) in read_journal(tmp_path).ended
    assert runner.started == [Work(1, 0)], "and no other begins"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12h", Budget(12, "h")),
        ("200USD", Budget(200, "usd")),
        ("1e18flops", Budget(1e18, "flops")),
    ],
)
def test_budgets_as_they_are_typed(text: str, found: Budget) -> None:
    assert budget.parse(text) == found


@pytest.mark.parametrize("text", ["12", "0h", "-3h", "12 days", "many"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a budget"):
        budget.parse(text)


def test_money_needs_a_price_and_the_kind_of_budget_stays(tmp_path: Path) -> None:
    plain = Settings("train.py", (), 4, budget="5USD")
    with pytest.raises(ConfigError, match="no price is known"):
        price_per_device_hour(plain)
    words = replace(plain, script_args=("record.price_per_device_hour=2.5",))
    assert price_per_device_hour(words) == 2.5
    by_instance = price_per_device_hour(replace(plain, cluster="p5.48xlarge:1"))
    assert 1 < by_instance < 20, "the catalogue's price of a node, over its devices"
    made = study(tmp_path, budget="2h")
    drive(made, 1)
    with pytest.raises(ConfigError, match="was 2h when the study began"):
        cli._check_budget(replace(made.settings, budget="1e18flops"), tmp_path)
    cli._check_budget(replace(made.settings, budget="20h"), tmp_path)
    assert load_study(tmp_path).settings.budget == "2h"
