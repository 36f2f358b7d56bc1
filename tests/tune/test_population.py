"""A population is a function of results: whoever was first, and however often the driver died."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, DamagedRun
from drivetrain.tune import decide, population
from drivetrain.tune.journal import Asked, Ended, Fork, Journal, State, read_journal
from drivetrain.tune.perturb import Rule, perturbed
from drivetrain.tune.settings import Settings, Study, load_study, open_study
from drivetrain.tune.space import Choice, Float, Int, Scalar, Space
from tests.tune.simulated import as_entry, search

SPACE = Space(
    {
        "optimization.learning_rate": Float(1e-4, 1e-1, log=True),
        "optimization.warmup_steps": Int(0, 9),
        "optimization.lr_scheduler_type": Choice(("constant", "linear", "cosine")),
        "optimization.min_lr_ratio": Float(
            0.0, 0.5, step=0.1, when={"optimization.lr_scheduler_type": ("linear", "cosine")}
        ),
    },
    ("optimization.warmup_steps != 3",),
)


def study(path: Path, space: Space = SPACE, **changes: Any) -> Study:
    size = changes.get("population", 8)
    given: dict[str, Any] = {
        "num_trials": size,
        "generation": size,
        "population": size,
        "rungs": (2, 4, 6, 8),
        "sampler": "random",
    }
    return open_study(path, Settings("train.py", (), **{**given, **changes}), space)


def objective(made: Study, work: decide.Work, state: State) -> Ended:
    """What a run would have come to: a function of its whole line, and of its values on the way."""
    value, trial = 0.0, state.asked[work.trial]
    while True:
        rate = trial.values["optimization.learning_rate"]
        assert isinstance(rate, float)
        value = value / 2 + abs(rate - 0.01)
        if trial.fork is None:
            break
        trial = state.asked[trial.fork.donor]
    if work.trial % 7 == 6:
        return Ended(work.trial, work.rung, "not_finite", reason="nan")
    return Ended(work.trial, work.rung, "done", (work.rung + 1) * 2, value / (work.rung + 1))


def test_the_same_forks_on_any_number_of_workers_and_after_kills(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    ends = []
    for number, (workers, kills) in enumerate([(1, 0), (2, 0), (3, 0), (8, 0), (3, 10)]):
        made = study(tmp_path / str(number), population=32)
        state = search(made, objective, workers, seed=number, kills=kills)
        best = decide.winner(made.settings, state)
        assert read_journal(made.path) == state
        ends.append((state.asked, dict(sorted(state.ended.items())), best))
    assert all(end == ends[0] for end in ends)
    asked, ended, best = ends[0]
    forks = [each.fork for each in asked if each.fork is not None]
    assert len(forks) >= 4 * 8, "a quarter of 32 at each of four rungs, and what has failed"
    assert best is not None
    assert best.rung == 4
    assert len([at for at in ended if at[1] == 4]) == 32, "all places come to the end"


def test_another_seed_gives_other_forks(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    one, two = (search(study(tmp_path / str(seed), seed=seed), objective, 2, 0) for seed in (0, 1))
    donors = [[each.fork and each.fork.donor for each in end.asked[8:]] for end in (one, two)]
    assert donors[0] != donors[1]


def settled(made: Study, values: list[float | None]) -> State:
    """All members at the first rung."""
    state = State()
    for member in range(made.settings.population):
        state.take(Asked(member, {"optimization.learning_rate": 0.01 * (member + 1)}))
    for member, value in enumerate(values):
        kind = "not_finite" if value is None else "done"
        state.take(Ended(member, 0, kind, 2, value))  # type: ignore[arg-type]
    return state


PLAIN = Space({"optimization.learning_rate": Float(1e-4, 1.0, log=True)})


def test_the_worst_and_the_failed_are_replaced_by_forks_of_the_best(tmp_path: Path) -> None:
    made = study(tmp_path, PLAIN, population=4, quantile=0.25)
    state = settled(made, [0.3, 0.1, 0.5])
    assert population.next_fork(made, state) is None, "member 3 is not there yet"
    assert decide.ready(made.settings, state) == [decide.Work(3, 0)]
    state.take(Ended(3, 0, "not_finite", 2))
    assert decide.ready(made.settings, state) == [], "nothing moves before forks are written down"
    due = population.next_fork(made, state)
    assert due is not None
    assert (due.trial, due.member, due.donor, due.rung, due.step) == (4, 3, 1, 0, 2)
    assert decide.is_over(made.settings, state, 3)
    assert not decide.is_over(made.settings, state, 1)
    state.take(as_entry(due))
    assert population.next_fork(made, state) is None, "the worst is the one that failed"
    assert decide.ready(made.settings, state) == [decide.Work(t, 1) for t in (0, 1, 2, 4)]

    made = study(tmp_path / "half", PLAIN, population=4, quantile=0.5)
    state = settled(made, [None, 0.2, None, None])
    forks = []
    while (due := population.next_fork(made, state)) is not None:
        forks.append((due.member, due.donor))
        state.take(as_entry(due))
    assert forks == [(0, 1), (2, 1), (3, 1)], "all that have failed, from the one that has not"
    state = settled(made, [None] * 4)
    assert population.next_fork(made, state) is None
    assert decide.ready(made.settings, state) == []
    assert all(decide.is_over(made.settings, state, trial) for trial in range(4))


def test_equals_go_by_their_number_and_max_turns_it_round(tmp_path: Path) -> None:
    made = study(tmp_path, PLAIN, population=4, mode="max")
    due = population.next_fork(made, settled(made, [0.5, 0.5, 0.5, 0.5]))
    assert due is not None
    assert (due.donor, due.member) == (0, 3)
    due = population.next_fork(made, settled(made, [0.1, 0.2, 0.9, 0.3]))
    assert due is not None
    assert (due.donor, due.member) == (2, 0)


def test_values_stay_in_their_ranges_and_near_the_donors() -> None:
    values: dict[str, Scalar] = {
        "optimization.learning_rate": 0.01,
        "optimization.warmup_steps": 4,
        "optimization.lr_scheduler_type": "linear",
        "optimization.min_lr_ratio": 0.2,
    }
    seen: dict[str, set[Any]] = {key: set() for key in values}
    for number in range(200):
        found = perturbed(SPACE, values, Rule(resample=0.0), f"draw {number}")
        assert found == perturbed(SPACE, values, Rule(resample=0.0), f"draw {number}")
        for key, value in found.items():
            seen[key].add(value)
    assert seen["optimization.learning_rate"] == {0.008, 0.012}
    assert seen["optimization.warmup_steps"] == {5}, "3 is not allowed"
    assert seen["optimization.lr_scheduler_type"] == {"constant", "cosine"}
    assert seen["optimization.min_lr_ratio"] <= {0.1, 0.2, 0.30000000000000004}

    anew = [perturbed(SPACE, values, Rule(resample=1.0), f"draw {number}") for number in range(200)]
    rates = [float(each["optimization.learning_rate"] or 0) for each in anew]
    assert min(rates) < 2e-4
    assert max(rates) > 5e-2
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    steps = {each["optimization.warmup_steps"] for each in anew}
    assert steps == set(range(10)) - {3}
    for each in anew:
        falls = each["optimization.lr_scheduler_type"] != "constant"
        assert ("optimization.min_lr_ratio" in each) == falls


def test_an_end_of_a_range_is_not_left_and_zero_is_not_kept() -> None:
    space = Space(
        {
            "optimization.weight_decay": Float(0.0, 0.1),
            "optimization.warmup_steps": Int(0, 4, step=2),
        }
    )
    high = {"optimization.weight_decay": 0.1, "optimization.warmup_steps": 4}
    zero = {"optimization.weight_decay": 0.0, "optimization.warmup_steps": 0}
    for number in range(50):
        found = perturbed(space, high, Rule(resample=0.0), str(number))
        assert found["optimization.weight_decay"] in (0.08000000000000002, 0.1)
        assert found["optimization.warmup_steps"] in (2, 4)
        found = perturbed(space, zero, Rule(resample=0.0), str(number))
        assert found["optimization.weight_decay"] != 0.0
        assert found["optimization.warmup_steps"] in (0, 2, 4)


@pytest.mark.parametrize(
    ("key", "values", "why"),
    [
        ("optimization.optimizer", ("adamw", "sgd"), "the donor's optimizer state"),
        ("seed", (1, 2), "the order of samples"),
        ("global_batch_size", (8, 16), "the order of samples"),
        ("micro_batch_size", (1, 2), "the layout"),
        ("parallel.strategy", ("ddp", "fsdp"), "the layout"),
        ("precision.dtype", ("fp32", "bf16"), "a different format"),
        ("model.pretrained", ("a", "b"), "the donor's weights would not fit"),
        ("max_steps", (8, 16), "end at different steps"),
        ("sentinel.every_steps", (1, 2), "does not apply it"),
    ],
)
def test_what_cannot_change_at_a_fork_is_refused_before_anything_starts(
    tmp_path: Path, key: str, values: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: cannot change at a fork: .*{why}"):
        study(tmp_path / "study", Space({key: Choice(values)}))
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"population": 1}, "--population = 1: a single member has no other"),
        ({"rungs": ()}, "--rungs: a population needs steps"),
        ({"quantile": 0.6}, "--quantile = 0.6"),
        ({"perturb": (1.1, 1.2)}, "--perturb = 1.1,1.2"),
        ({"resample": 2.0}, "--resample = 2.0"),
        ({"schedule": "eager"}, "--schedule = eager"),
    ],
)
def test_numbers_that_make_no_population(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        study(tmp_path, PLAIN, **changes)


def test_a_population_is_read_back_and_does_not_change(tmp_path: Path) -> None:
    made = study(tmp_path, PLAIN, population=4)
    assert load_study(tmp_path) == made
    with pytest.raises(ConfigError, match="population = 8: was 4"):
        study(tmp_path, PLAIN, population=8)
    journal = Journal(tmp_path)
    journal.write(Asked(0, {}))
    journal.write(Asked(1, {}, Fork(0, 0, 2, 3, "trials/00000/checkpoints/step-000000002-a1")))
    assert read_journal(tmp_path) == journal.state
    first, second = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert "fork" not in first
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(second.replace('"trial": 1', '"trial": 2').replace('"donor": 0', '"donor": 2'))
        file.write("\n")
    with pytest.raises(DamagedRun, match="line 3"):
        read_journal(tmp_path)
    assert replace(made.settings, quantile=0.5).num_replaced == 2
