"""The simulator against what is known without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drivetrain.cli.planning import inputs_of
from drivetrain.core.errors import ConfigError
from drivetrain.plan.simulation.engine import simulate
from drivetrain.plan.simulation.inputs import (
    DAY_S,
    HOUR_S,
    Inputs,
    Policy,
    best_interval_s,
    expected_goodput,
    seconds,
)
from drivetrain.plan.simulation.outcome import outcome_of, what_if
from drivetrain.plan.simulation.published import ALL, Published

SIMPLE = Inputs(
    num_nodes=100,
    node_mtbf_s=100 * 2 * HOUR_S,
    days=20,
    save_s=60,
    detect_s=120,
    restart_s=480,
    hardware=0.0,
    replications=200,
)


@pytest.mark.parametrize("mtbf_h", [0.5, 2.0, 12.0])
@pytest.mark.parametrize("interval_s", [300.0, 1800.0, None])
def test_goodput_is_dalys_where_dalys_formula_holds(
    mtbf_h: float, interval_s: float | None
) -> None:
    inputs = replace(SIMPLE, node_mtbf_s=100 * mtbf_h * HOUR_S, interval_s=interval_s)
    outcome = outcome_of(inputs)
    assert outcome.closed_form is not None
    # three standard errors of the mean, and what a run's unfinished last cycle is worth
    allowed = 1.5 * outcome.goodput.error + 0.001
    assert abs(outcome.goodput.mean - outcome.closed_form) < allowed


def test_dalys_interval_is_the_best() -> None:
    best = best_interval_s(60.0, 7200.0)
    goodput = {f: expected_goodput(best * f, 60.0, 600.0, 7200.0) for f in (0.5, 0.9, 1, 1.1, 2)}
    assert max(goodput, key=lambda f: goodput[f]) == 1


@pytest.mark.parametrize("policy", ["restart", "elastic", "live"])
def test_every_second_is_accounted_for(policy: Policy) -> None:
    inputs = replace(
        SIMPLE,
        policy=policy,
        num_replicas=4,
        hardware=0.7,
        repair_s=6 * HOUR_S,
        spares=1,
        correlated_per_day=0.5,
        correlated_nodes=3,
        straggler_mtbf_s=100 * DAY_S,
    )
    runs = simulate(inputs)
    spent = runs.useful + sum(runs.lost.values())
    np.testing.assert_allclose(spent, inputs.days * DAY_S, rtol=1e-9)
    assert all((values >= -1e-6).all() for values in runs.lost.values())


def test_the_same_seed_gives_the_same_runs_and_another_does_not() -> None:
    first, again = simulate(SIMPLE), simulate(SIMPLE)
    other = simulate(replace(SIMPLE, seed=1))
    assert (first.useful == again.useful).all()
    assert (first.useful != other.useful).any()


def test_failures_come_as_often_as_stated() -> None:
    expected = 20 * 24 / 2
    assert outcome_of(SIMPLE).failures.mean == pytest.approx(expected, rel=0.01)


def test_spares_elastic_and_live_each_help() -> None:
    scarce = replace(SIMPLE, hardware=1.0, repair_s=4 * HOUR_S, num_replicas=10)
    goodputs = [
        outcome_of(changed).goodput.mean
        for changed in (
            scarce,
            replace(scarce, policy="elastic"),
            replace(scarce, spares=20),
            replace(scarce, policy="live"),
        )
    ]
    assert goodputs == sorted(goodputs)


def test_stragglers_cost_what_they_slow_down() -> None:
    inputs = replace(
        SIMPLE,
        node_mtbf_s=1e12,
        save_s=0.0,
        straggler_mtbf_s=100 * 10 * HOUR_S,
        straggler_s=1 * HOUR_S,
        straggler_slowdown=1.5,
    )
    # slow nodes: Poisson with mean 0.1, and any of them slows all
    expected = 1 - (1 - np.exp(-0.1)) * (1 - 1 / 1.5)
    assert outcome_of(inputs).goodput.mean == pytest.approx(expected, abs=0.002)


def test_money_is_what_all_nodes_cost() -> None:
    outcome = outcome_of(replace(SIMPLE, price_per_device_hour=2.0, spares=10))
    assert outcome.money is not None
    assert outcome.money.paid == pytest.approx(110 * 8 * 20 * 24 * 2.0)
    per_hour = 2.0 * 1.1 / outcome.goodput.mean
    assert outcome.money.per_useful_hour.mean == pytest.approx(per_hour, rel=0.01)


def test_what_if_changes_one_input() -> None:
    fewer, more = what_if(replace(SIMPLE, hardware=1.0), "spares", [0, 50])
    assert fewer.goodput.high < more.goodput.low


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.name)
def test_published_runs_come_out_within_three_points(run: Published) -> None:
    goodput = outcome_of(run.inputs).goodput.mean
    if run.is_bound:
        assert run.reported <= goodput <= run.reported + 0.05
    else:
        assert abs(goodput - run.reported) <= 0.03


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("10m", 600.0), ("2.5h", 9000.0), ("54d", 54 * DAY_S)]
)
def test_times_are_read(text: str, value: float) -> None:
    assert seconds(text, "--x") == value


def test_all_mistakes_are_named_at_once() -> None:
    words = {
        "nodes": 8, "mtbf": "soon", "days": 30.0, "policy": "hope", "step_time": "10s",
        "checkpoint_interval": "auto", "save_cost": "30s", "detect": "60s", "restart": "5m",
        "hardware": 0.8, "repair": "1d", "spares": 0, "replicas": 1, "stall": "30s",
        "correlated": "often", "stragglers": "", "price": None, "devices_per_node": 8,
        "replications": 10, "seed": 0,
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        inputs_of(words)
    assert [p.where for p in caught.value.problems] == ["--mtbf", "--policy", "--correlated"]
    with pytest.raises(ConfigError, match="live needs replicas"):
        inputs_of({**words, "mtbf": "30d", "policy": "live", "correlated": ""})


def test_without_correlated_failures_their_number_of_nodes_is_not_checked() -> None:
    assert replace(SIMPLE, num_nodes=4, correlated_per_day=0.0).num_nodes == 4
    with pytest.raises(ConfigError, match="--correlated = 16: there are 4 nodes"):
        replace(SIMPLE, num_nodes=4, correlated_per_day=0.1)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("days", "--days"),
        ("save_s", "--save-cost"),
        ("straggler_s", "--stragglers"),
        ("straggler_slowdown", "--stragglers"),
        ("price_per_device_hour", "--price"),
        ("correlated_per_day", "--correlated"),
    ],
)
def test_a_refused_number_is_named_by_its_flag(field: str, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        Inputs(num_nodes=32, node_mtbf_s=DAY_S, **{field: -1.0})  # type: ignore[arg-type]
    assert [problem.where for problem in error.value.problems] == [flag]
