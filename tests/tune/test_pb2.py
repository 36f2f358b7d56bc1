"""PB2: the posterior is scikit-learn's; forks go where members gained, whoever came first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.tune import decide, gaussian_process, pb2, population
from drivetrain.tune.gaussian_process import Apart, Array, Kernel
from drivetrain.tune.journal import Asked, Ended, Outcome, State
from drivetrain.tune.perturb import perturbed, place_of
from drivetrain.tune.population import Due
from drivetrain.tune.settings import Study, left_to_perturb
from drivetrain.tune.space import Choice, Float, Int, Parameter, Space
from tests.tune.simulated import as_entry, search
from tests.tune.test_population import study as a_population

RATE, DECAY, STEPS, KIND = (
    f"optimization.{key}"
    for key in ("learning_rate", "weight_decay", "warmup_steps", "lr_scheduler_type")
)
LOG = Float(1e-4, 1.0, log=True)
ONE = Space({RATE: LOG})


def points_and_targets(num: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    points = np.hstack([rng.integers(0, 4, (num, 1)).astype(float), rng.random((num, 3))])
    return points, rng.normal(size=num)


def test_the_posterior_and_the_likelihood_are_scikit_learns() -> None:
    """Its Matérn of 1/2 over the time is ours: (1 - ε)^(|t - t'| / 2) = exp(-|t - t'| / length)."""
    pytest.importorskip("sklearn")
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

    kernel, far = Kernel(0.3, 0.7, 0.4, 0.2), 1e12
    in_time = Matern([-2 / math.log(1 - 0.4), far, far, far], nu=0.5)
    in_space = RBF([far, 0.7, 0.3, 0.3])
    points, targets = points_and_targets(12)
    theirs = GaussianProcessRegressor(
        ConstantKernel(0.8) * in_time * in_space, alpha=0.2, optimizer=None
    ).fit(points, targets)
    at = points_and_targets(20)[0][12:] + 0.1
    mean, deviation = theirs.predict(at, return_std=True)
    assert gaussian_process.mean(kernel, points, targets, at) == pytest.approx(mean, abs=1e-9)
    assert gaussian_process.deviation(kernel, points, at) == pytest.approx(deviation, abs=1e-9)
    constant = 12 / 2 * math.log(2 * math.pi)
    found = kernel.log_likelihood(Apart.of(points, points), targets) - constant
    assert found == pytest.approx(theirs.log_marginal_likelihood(), abs=1e-9)


def test_one_observation_in_closed_form() -> None:
    kernel, points = Kernel(0.5, 1.0, 0.19, 0.25), np.array([[0.0, 0.5, 0.2]])
    at = np.array([[0.0, 0.5, 0.2], [2.0, 0.5, 0.2], [2.0, 0.5, 0.7], [0.0, 1.5, 0.2]])
    near = 0.75 * np.array([1.0, 0.81, 0.81 * math.exp(-0.5), math.exp(-0.5)])
    found = gaussian_process.mean(kernel, points, np.array([2.0]), at)
    assert found == pytest.approx(near * 2.0)
    assert gaussian_process.deviation(kernel, points, at) == pytest.approx(np.sqrt(0.75 - near**2))


def test_the_kernel_is_fitted_to_what_was_seen() -> None:
    places = np.linspace(0.0, 1.0, 12)
    points = np.array([[time, 0.5, place] for time in (0.0, 1.0) for place in places])
    smooth = np.tile(np.sin(3 * places), 2)
    found = gaussian_process.fitted(points, smooth)
    assert (found.forgetting, found.noise) == (0.0, 0.1)
    assert found.length >= 0.4
    turned = np.concatenate([np.sin(6 * places), np.sin(6 * places + 2.5)])
    assert gaussian_process.fitted(points, turned).forgetting == 0.4
    chance = np.random.default_rng(2).normal(size=24)
    assert gaussian_process.fitted(points, chance).noise == 0.7


def study(path: Path, space: Space = ONE, **changes: Any) -> Study:
    given: dict[str, Any] = {"population": 12, "rungs": (2, 4, 6), "explore": "pb2"}
    return a_population(path, space, **{**given, **changes})


def gone(place: float) -> float:
    """A loss that is lowest at 3/4 of the range."""
    return (place - 0.75) ** 2


def at_first_rung(made: Study, ends: dict[int, float | Outcome] | None = None) -> State:
    """Members spread over the first range, each with its loss; `ends` has others."""
    state, size = State(), made.settings.population
    for member in range(size):
        values = {RATE: 10 ** (-4 + 4 * member / (size - 1))}
        rest = {key: each.ends[0] for key, each in made.space.parameters.items() if key != RATE}
        state.take(Asked(member, {**values, **rest}))
    for member in range(size):
        end = (ends or {}).get(member, gone(member / (size - 1)))
        if isinstance(end, str):
            state.take(Ended(member, 0, end, 2))
        else:
            state.take(Ended(member, 0, "done", 2, end))
    return state


def forks(made: Study, state: State) -> list[Due]:
    """All of the rung that is reached."""
    found = []
    while (due := population.next_fork(made, state)) is not None:
        found.append(due)
        state.take(as_entry(due))
    return found


def first(at: Array) -> Array:
    """A bound that rises with the first number."""
    found: Array = at[:, 0]
    return found


def places(found: list[Due]) -> list[float]:
    return [place_of(LOG, due.values[RATE]) for due in found]


def test_forks_go_where_members_gained(tmp_path: Path) -> None:
    made = study(tmp_path, quantile=0.5)
    where = places(forks(made, at_first_rung(made)))
    assert len(set(where)) == 6
    assert all(0.65 < place < 0.85 for place in where), "the best is at 3/4"


def test_of_two_good_places_both_are_looked_at(tmp_path: Path) -> None:
    """The same shape on both sides: forks that knew nothing of each other would share one."""
    made = study(tmp_path, quantile=0.5)
    state = at_first_rung(made, {member: abs(abs(2 * member - 11) - 7) for member in range(12)})
    where = places(forks(made, state))
    assert sum(place < 0.4 for place in where) >= 2
    assert sum(place > 0.6 for place in where) >= 2


def test_whoever_goes_on_counts_as_looked_at(tmp_path: Path) -> None:
    """With the same draw, so that nothing but the others' values can make a difference."""
    made = study(tmp_path)
    state = at_first_rung(made, dict.fromkeys(range(12), 0.5))

    def where(going_on: list[int]) -> float:
        values = pb2.explored(made, state, 0, going_on, 0, {RATE: 0.01}, "one")
        return place_of(LOG, values[RATE])

    alone = where([])
    nearest = min(range(12), key=lambda member: abs(member / 11 - alone))
    assert where([]) == alone
    assert abs(where([nearest]) - alone) > 0.1


def test_max_turns_it_round(tmp_path: Path) -> None:
    made = study(tmp_path, mode="max")
    state = at_first_rung(made, {member: -gone(member / 11) for member in range(12)})
    assert 0.6 < places(forks(made, state))[0] < 0.9


def test_gains_are_those_of_each_interval_from_wherever_it_began(tmp_path: Path) -> None:
    made = study(tmp_path, population=4)
    state = at_first_rung(made, {0: 0.9, 1: 0.4, 2: 0.2, 3: 0.6})
    (due,) = forks(made, state)
    assert (due.member, due.donor, due.trial) == (0, 2, 4)
    for trial, value in ((1, 0.3), (2, 0.19), (3, 0.1), (4, 0.05)):
        state.take(Ended(trial, 1, "done", 4, value))
    points, gains = pb2.observed(made, state, 1)
    assert points[:, 0].tolist() == [0.0] * 4 + [1.0] * 4
    assert points[:4, 1].tolist() == [0.5] * 4, "all began the same"
    assert points[4:, 1].tolist() == [0.625, 0.875, 0.375, 0.875], "as the donor stood"
    assert points[7, 2] == place_of(LOG, due.values[RATE])
    order = np.argsort(gains[4:]).tolist()
    assert order == [1, 0, 3, 2], "0.01, 0.1, 0.15 from the donor's 0.2, and 0.5"
    assert gains.sum() == pytest.approx(0.0)


def test_nan_is_the_least_gain_and_other_failures_say_nothing(tmp_path: Path) -> None:
    made = study(tmp_path)
    ends: dict[int, float | Outcome] = {11: "not_finite", 10: "not_finite", 9: "failed"}
    state = at_first_rung(made, ends)
    points, gains = pb2.observed(made, state, 0)
    assert points[:, 2] == pytest.approx([member / 11 for member in range(12) if member != 9])
    assert gains[-1] == gains[-2] == gains.min() < gains[:-2].min()
    for due in forks(made, state):
        assert place_of(LOG, due.values[RATE]) < 0.95
    alone = at_first_rung(made, dict.fromkeys(range(1, 12), "failed"))
    (due, *_) = forks(made, alone)
    assert due.donor == 0
    assert 1e-4 <= float(due.values[RATE] or 0) <= 1.0, "one result"


@pytest.mark.parametrize("value", [0.0, 0.5, 1e300])
def test_equal_gains_are_no_obstacle(tmp_path: Path, value: float) -> None:
    made = study(tmp_path, quantile=0.5)
    found = forks(made, at_first_rung(made, dict.fromkeys(range(12), value)))
    assert all(1e-4 <= float(due.values[RATE] or 0) <= 1.0 for due in found)
    assert len({(due.donor, due.values[RATE]) for due in found}) == 6, "else one run twice"


def test_the_same_run_is_not_begun_twice(tmp_path: Path) -> None:
    """Training repeats to the bit: a donor's values from its own checkpoint are known already."""
    space = Space({STEPS: Int(1, 2)})
    assert pb2.best_of(space, {STEPS: 1}, first, "a") == {STEPS: 2}
    assert pb2.best_of(space, {STEPS: 1}, first, "a", [{STEPS: 2}]) == {STEPS: 1}
    made = study(tmp_path, Space({RATE: LOG, STEPS: Int(1, 2)}))
    state = at_first_rung(made)
    (due, *_) = forks(made, state)
    same = pb2._same_line(state, 0, range(len(state.asked)), due.donor)
    assert state.asked[due.donor].values in same
    assert due.values in same
    assert len(same) == 1 + sum(
        each.fork is not None and each.fork.donor == due.donor for each in state.asked
    )


def test_one_that_diverges_does_not_hide_the_others(tmp_path: Path) -> None:
    made = study(tmp_path)
    found = places(forks(made, at_first_rung(made, {0: 1e30})))
    assert 0.6 < found[0] < 0.9


@pytest.mark.parametrize(
    ("parameter", "end"),
    [(LOG, 1.0), (Float(0.1, 0.7), 0.7), (Float(0.1, 1.0, step=0.4), 0.9), (Int(1, 64), 64)],
)
def test_an_end_of_a_range_is_reached_and_not_left(parameter: Parameter, end: float) -> None:
    key = STEPS if isinstance(parameter, Int) else RATE
    space = Space({key: parameter})

    assert pb2.best_of(space, {key: parameter.ends[0]}, first, "a") == {key: end}
    low = pb2.best_of(space, {key: parameter.ends[1]}, lambda at: -first(at), "a")
    assert low[key] == pytest.approx(parameter.ends[0], rel=1e-12)


def test_constraints_hold_and_where_nothing_is_allowed_the_fork_is_perturbed(
    tmp_path: Path,
) -> None:
    space = Space({RATE: LOG, DECAY: Float(0.0, 1.0)}, (f"{RATE} < 1e-2",))
    made = study(tmp_path / "some", space)
    for due in forks(made, at_first_rung(made)):
        assert float(due.values[RATE] or 0) < 1e-2
    values = {RATE: 0.5, DECAY: 0.0}
    narrow = Space({RATE: LOG, DECAY: Float(0.0, 1.0)}, (f"{DECAY} == 2",))
    assert pb2.best_of(narrow, values, first, "a") == values


def test_lists_and_what_depends_on_them_are_perturbed(tmp_path: Path) -> None:
    ratio = "optimization.min_lr_ratio"
    space = Space(
        {
            KIND: Choice(("constant", "linear", "cosine")),
            ratio: Float(0.0, 0.5, when={KIND: ("linear", "cosine")}),
            RATE: LOG,
        }
    )
    made = study(tmp_path, space)
    assert left_to_perturb(made.settings, space) == [KIND, ratio]
    state = at_first_rung(made)
    due = population.next_fork(made, state)
    assert due is not None
    draw = f"0/fork/0/{due.member}/values"
    by_chance = perturbed(space, state.asked[due.donor].values, made.settings.perturbing, draw)
    assert due.values.keys() == by_chance.keys()
    assert {key for key, value in due.values.items() if value != by_chance[key]} == {RATE}


def line(made: Study, work: decide.Work, state: State) -> Ended:
    """A loss that falls faster near the best rate, over all of a trial's line; some fail."""
    if work.trial % 9 == 8:
        return Ended(work.trial, work.rung, "not_finite", reason="nan")
    total, trial, rung = 2.0, state.asked[work.trial], work.rung
    while True:
        rate = trial.values[RATE]
        total -= (rung - trial.first_rung + 1) * 0.4 / (1 + 20 * gone(place_of(LOG, rate)))
        if trial.fork is None:
            return Ended(work.trial, work.rung, "done", 2 * work.rung + 2, total)
        rung, trial = trial.fork.rung, state.asked[trial.fork.donor]


def test_the_same_forks_on_any_number_of_workers_and_after_kills(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space, ends = Space({RATE: LOG, STEPS: Int(0, 9)}), []
    for number, (workers, kills) in enumerate([(1, 0), (2, 0), (3, 0), (8, 0), (3, 10)]):
        made = study(tmp_path / str(number), space)
        state = search(made, line, workers, seed=number, kills=kills)
        ends.append((state.asked, dict(sorted(state.ended.items()))))
    assert all(end == ends[0] for end in ends)
    assert sum(each.fork is not None for each in ends[0][0]) >= 9, "three at each of three rungs"
    other = search(study(tmp_path / "other", space, seed=1), line, 1, seed=0)
    assert other.asked != ends[0][0]


def test_it_does_not_matter_who_came_first(tmp_path: Path) -> None:
    made = study(tmp_path, quantile=0.5)
    state = at_first_rung(made)
    later = State()
    for asked in state.asked:
        later.take(asked)
    for at in sorted(state.ended, reverse=True):
        later.take(state.ended[at])
    for ours, theirs in zip(
        pb2.observed(made, state, 0), pb2.observed(made, later, 0), strict=True
    ):
        assert np.array_equal(ours, theirs)
    assert forks(made, state) == forks(made, later)


def test_it_finds_more_than_chance_does(tmp_path: Path) -> None:
    """On a loss of known shape, over ten seeds: how far the last forks are from the best rate."""
    pytest.importorskip("optuna")
    off: dict[str, list[float]] = {"perturb": [], "pb2": []}
    for explore, found in off.items():
        for seed in range(10):
            made = study(tmp_path / f"{explore}{seed}", explore=explore, seed=seed, population=8)
            last = [a for a in search(made, line, 8, seed=0).asked if a.fork and a.fork.rung == 2]
            found += [abs(place_of(LOG, each.values[RATE]) - 0.75) for each in last]
    assert np.mean(off["pb2"]) < 0.8 * np.mean(off["perturb"])


def test_where_it_makes_no_sense_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--explore = pb2: applies only to a population"):
        study(tmp_path, population=0, num_trials=8, generation=8, rungs=())
    lists = Space({KIND: Choice(("constant", "linear"))})
    with pytest.raises(
        ConfigError, match="--explore = pb2: searches only ranges that every trial has"
    ):
        study(tmp_path, lists)
    study(tmp_path / "by chance", lists, explore="perturb")
