"""Decisions are a function of results: whoever was first, and however often the driver died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, DamagedRun
from drivetrain.tune import decide, sampling, stopping
from drivetrain.tune.journal import Ended, Journal, State, read_journal
from drivetrain.tune.settings import Settings, Study, load_study, open_study
from drivetrain.tune.space import Choice, Float, Int, Space
from tests.tune.simulated import search

pytest.importorskip("optuna")

SPACE = Space(
    {
        "optimization.learning_rate": Float(1e-4, 1e-1, log=True),
        "optimization.warmup_steps": Int(0, 9),
        "optimization.optimizer": Choice(("adamw", "sgd")),
        "optimization.momentum": Float(0.0, 0.9, when={"optimization.optimizer": ("sgd",)}),
    },
    ("optimization.warmup_steps != 3",),
)


def study(tmp_path: Path, **changes: Any) -> Study:
    given: dict[str, Any] = {"num_trials": 12, "generation": 4, "rungs": (2, 4), "factor": 2}
    return open_study(tmp_path, Settings("train.py", (), **{**given, **changes}), SPACE)


def objective(made: Study, work: decide.Work, state: State) -> Ended:
    """What a run would have come to: a function of its values and its steps."""
    values = state.asked[work.trial].values
    rate, warmup = values["optimization.learning_rate"], values["optimization.warmup_steps"]
    assert isinstance(rate, float)
    assert isinstance(warmup, int)
    if work.trial % 5 == 4:
        return Ended(work.trial, work.rung, "not_finite", reason="nan")
    value = abs(rate - 0.01) + warmup / 100 / (work.rung + 1)
    return Ended(work.trial, work.rung, "done", (work.rung + 1) * 2, value)


RULES = [
    {"sampler": "tpe"},
    {"sampler": "random"},
    {"sampler": "gp"},
    {"sampler": "qmc"},
    {"promote": "stop"},
    {"promote": "stop", "sampler": "random"},
    {"stopping": "median", "sampler": "random"},
    {"stopping": "median", "promote": "stop"},
    {"stopping": "hyperband", "generation": 6},
    {"stopping": "hyperband", "generation": 6, "promote": "stop", "sampler": "random"},
]


def test_an_eager_sampler_knows_of_trials_that_wait_at_a_rung(tmp_path: Path) -> None:
    made = study(tmp_path, schedule="eager", num_trials=30, seed=1)
    drawn = State()
    for _ in range(12):
        drawn.take(sampling.ask(made, drawn))

    def next_values(sign: float) -> dict[str, Any]:
        state = State()
        for trial, asked in enumerate(drawn.asked):
            state.take(asked)
            rate = float(str(asked.values["optimization.learning_rate"]))
            state.take(Ended(trial, 0, "done", 2, sign * rate))
        return dict(sampling.ask(made, state).values)

    assert next_values(1.0) != next_values(-1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_the_same_study_on_any_number_of_workers_and_after_kills(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    ends = []
    for number, (workers, kills) in enumerate([(1, 0), (2, 0), (3, 0), (8, 0), (3, 10)]):
        made = study(tmp_path / str(number), num_trials=24, **rule)
        state = search(made, objective, workers, seed=number, kills=kills)
        best = decide.winner(made.settings, state)
        ends.append((state.asked, dict(sorted(state.ended.items())), best))
    assert len(ends[0][0]) == 24
    assert ends[0][2] is not None
    assert ends[0][2].rung == 2
    assert all(end == ends[0] for end in ends)
    reached = [sum(rung == at for _, rung in ends[0][1]) for at in range(3)]
    assert max(reached) > reached[2] or rule.get("stopping") == "hyperband", "none has ended early"
    assert sum(reached) < 24 * 3 - 6, "a bracket that begins later has none of the first rungs"


@pytest.mark.parametrize("rule", ["successive-halving", "hyperband", "median"])
@pytest.mark.parametrize("promote", ["pause", "stop"])
def test_an_eager_study_comes_to_its_end(tmp_path: Path, rule: str, promote: str) -> None:
    made = study(tmp_path, schedule="eager", stopping=rule, promote=promote)
    state = search(made, objective, 3, seed=1, kills=3)
    assert len(state.asked) == 12
    assert all(decide.is_over(made.settings, state, trial) for trial in range(12))
    assert {rung for _, rung in state.ended} == {0, 1, 2}


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_trials_are_asked_for_as_of_optunas_own_storage(tmp_path: Path, sampler: str) -> None:
    """Ours shares the trials before it instead of copying them for each question."""
    made, state = study(tmp_path, sampler=sampler, num_trials=16), State()
    while (trial := decide.next_trial(made.settings, state)) is not None or decide.ready(
        made.settings, state
    ):
        if work := decide.ready(made.settings, state)[:1]:
            state.take(objective(made, work[0], state))
            continue
        asked = sampling.ask(made, state)
        assert trial is not None
        assert asked.values == _asked_of_optuna(made, state, trial)
        state.take(asked)


def _asked_of_optuna(made: Study, state: State, trial: int) -> dict[str, Any]:
    import optuna

    known = decide.told(made.settings, trial)
    for attempt in range(100):
        seed = sampling._seed(made.settings.seed, trial, attempt)
        with sampling.quiet(optuna):
            before = [
                sampling.as_optuna(made, state, each, is_known=each in known)
                for each in range(trial)
            ]
            sampler = sampling._sampler(optuna, made.settings, seed, before)
            plain = optuna.create_study(sampler=sampler)
            plain.add_trials(before)
            values: dict[str, Any] = sampling.suggested(made.space, plain.ask())
        if made.space.allows(values):
            return values
    raise AssertionError("no draw keeps the constraint")


def test_a_driver_looks_at_the_open_trials_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of trials that are over: what is known of them is not found out again."""
    made, state = study(tmp_path, num_trials=120, sampler="random", rungs=(2,)), State()
    looked, is_over = list[int](), decide.is_over

    def counted(settings: Settings, state: State, trial: int) -> bool:
        looked.append(trial)
        return is_over(settings, state, trial)

    monkeypatch.setattr(decide, "is_over", counted)
    while decide.next_trial(made.settings, state) is not None:
        state.take(sampling.ask(made, state))
        looked.clear()
        for work in decide.ready(made.settings, state):
            state.take(objective(made, work, state))
        decide.ready(made.settings, state)
        assert len(looked) <= 2 * made.settings.generation, len(state.asked)
    assert len(state.asked) == 120


@pytest.mark.parametrize("generation", [4, 8])
def test_tpe_goes_by_results(tmp_path: Path, generation: int) -> None:
    """Else the test above would show nothing: after eight results it no longer asks at random."""
    ends = []
    for sign in (1, -1):
        made = study(tmp_path / str(sign), num_trials=16, rungs=(), generation=generation)
        journal = Journal(made.path)
        while decide.next_trial(made.settings, journal.state) is not None:
            journal.write(sampling.ask(made, journal.state))
            for work in decide.ready(made.settings, journal.state):
                end = objective(made, work, journal.state)
                value = None if end.value is None else sign * end.value
                journal.write(Ended(end.trial, end.rung, end.outcome, end.step, value))
        ends.append([asked.values for asked in journal.state.asked])
    assert ends[0][:8] == ends[1][:8]
    assert ends[0][8:] != ends[1][8:]


@pytest.mark.parametrize(("generation", "random"), [(1, 10), (4, 8), (6, 10), (8, 8), (32, 10)])
def test_tpe_draws_about_ten_at_random_in_whole_generations(generation: int, random: int) -> None:
    assert sampling.random_trials(generation) == random


def test_promotions(tmp_path: Path) -> None:
    made = study(tmp_path, num_trials=6, generation=4, factor=2, rungs=(2, 4), sampler="random")
    state = State()
    for _ in range(6):
        state.take(sampling.ask(made, state))
    for trial, value in ((1, 0.5), (2, 0.1), (3, 0.1)):
        state.take(Ended(trial, 0, "done", 2, value))
    assert decide.promoted(made.settings, state, 1, 0) is None, "trial 0 is not there yet"
    assert decide.ready(made.settings, state)[0] == decide.Work(0, 0)
    state.take(Ended(0, 0, "failed"))
    assert decide.promoted(made.settings, state, 1, 0) == {2, 3}
    assert decide.Work(2, 1) in decide.ready(made.settings, state)
    assert decide.is_over(made.settings, state, 1)
    state.take(Ended(3, 1, "done", 4, 0.1))
    state.take(Ended(2, 1, "done", 4, 0.1))
    assert decide.promoted(made.settings, state, 2, 1) == {2}, "equals go by their number"


def at_rung(rung: int, **values: float) -> list[Ended]:
    return [Ended(int(name[1:]), rung, "done", 2, value) for name, value in values.items()]


def test_median_lets_the_better_half_go_on(tmp_path: Path) -> None:
    settings = study(tmp_path, stopping="median").settings
    here = [*at_rung(0, t0=0.5, t1=0.1, t2=0.3), Ended(3, 0, "failed")]
    assert stopping.who_goes_on(settings, here, 0) == {1, 2}
    upwards = study(tmp_path / "max", stopping="median", mode="max").settings
    assert stopping.who_goes_on(upwards, here, 0) == {0, 2}
    assert stopping.limit(settings, here[:2]) == pytest.approx(0.3)


def test_where_trials_go_straight_on_a_limit_is_known_before_they_start(tmp_path: Path) -> None:
    made = study(tmp_path, promote="stop", sampler="random", factor=3)
    settings, state = made.settings, State()
    for trial in range(4):
        state.take(sampling.ask(made, state))
        assert state.asked[trial].limits == (None, None), "the first generation has none before it"
    for trial, value in enumerate((0.4, 0.1, 0.3, 0.2)):
        for rung in range(3):
            assert decide.next_trial(settings, state) is None, "an earlier one is not over"
            assert decide.ready(settings, state)[0] == decide.Work(trial, rung)
            state.take(Ended(trial, rung, "done", 2 + rung, value + rung))
    state.take(sampling.ask(made, state))
    assert state.asked[4].limits == (0.1, 1.1), "the best one of five"
    words = stopping.config_words(settings, state.asked[4], 0)
    assert words[0] == "early_stopping.limits=[[2, 0.1], [4, 1.1]]"
    assert not any(word.startswith("stop_at_step") for word in words)
    for value, goes_on in ((0.1, True), (0.11, False)):
        state.take(Ended(4, 0, "done", 2, value))
        assert decide.is_over(settings, state, 4) is not goes_on
    upwards = study(tmp_path / "max", promote="stop", mode="max").settings
    assert stopping.limit(upwards, at_rung(0, t0=0.4, t1=0.1, t2=0.3, t3=0.2)) == 0.3


def test_a_generation_is_one_hyperband(tmp_path: Path) -> None:
    settings = study(tmp_path, stopping="hyperband", generation=17, factor=3).settings
    first = [stopping.first_rung(settings, trial) for trial in range(17)]
    assert first == [0] * 9 + [1] * 5 + [2] * 3
    assert stopping.first_rung(settings, 17) == 0
    assert stopping.rivals(settings, 10) == [9, 10, 11], "the study has twelve trials"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stopping": "none"}, "--stopping = none: decides nothing at --rungs"),
        ({"stopping": "median", "rungs": ()}, "needs --rungs"),
        ({"promote": "stop", "rungs": ()}, "--promote = stop: needs --rungs"),
        ({"promote": "stop", "generation": 12}, "no other follows"),
        ({"stopping": "hyperband", "generation": 2}, "3 brackets"),
        ({"patience": 0}, "--patience = 0"),
    ],
)
def test_rules_that_could_decide_nothing_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        study(tmp_path, **changes)


def test_values_keep_constraints_and_conditions(tmp_path: Path) -> None:
    made, state = study(tmp_path, sampler="random", num_trials=40), State()
    for _ in range(40):
        state.take(sampling.ask(made, state))
    for asked in state.asked:
        assert asked.values["optimization.warmup_steps"] != 3
        is_sgd = asked.values["optimization.optimizer"] == "sgd"
        assert ("optimization.momentum" in asked.values) == is_sgd
    impossible = Study(tmp_path, made.settings, Space(dict(SPACE.parameters), ("seed > 2",) * 0))
    narrow = Space({"optimization.warmup_steps": Int(3, 3)}, SPACE.constraints)
    with pytest.raises(ConfigError, match="100 draws"):
        sampling.ask(Study(tmp_path, impossible.settings, narrow), State())


def test_a_study_may_grow_but_not_change(tmp_path: Path) -> None:
    made = study(tmp_path)
    assert load_study(tmp_path) == made
    study(tmp_path, num_trials=16)
    for changes, said in (
        ({"num_trials": 12}, "the study has 16"),
        ({"num_trials": 16, "seed": 1}, "seed = 1: was 0"),
        ({"num_trials": 16, "rungs": (3,)}, "rungs"),
    ):
        with pytest.raises(ConfigError, match=said):
            study(tmp_path, **changes)
    study(tmp_path, num_trials=18)
    with pytest.raises(ConfigError, match="within a generation"):
        study(tmp_path, num_trials=20)


def test_a_torn_line_is_cut_off_and_a_wrong_one_is_said(tmp_path: Path) -> None:
    made = study(tmp_path)
    journal = Journal(tmp_path)
    journal.write(sampling.ask(made, journal.state))
    journal.write(Ended(0, 0, "done", 2, 0.25))
    path = tmp_path / "journal.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + b'{"kind": "ended", "tri')
    assert read_journal(tmp_path).ended[0, 0].value == 0.25
    assert path.read_bytes() != good
    journal = Journal(tmp_path)
    assert path.read_bytes() == good
    for wrong in ({"kind": "ended", "trial": 7, "rung": 0, "outcome": "done"}, {"kind": "x"}, 3):
        path.write_bytes(good + json.dumps(wrong).encode() + b"\n")
        with pytest.raises(DamagedRun, match="line 3"):
            read_journal(tmp_path)


def test_optuna_reads_the_mirror(tmp_path: Path) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    made = study(tmp_path, sampler="random")
    state = search(made, objective, 2, seed=0)
    for _ in range(2):  # the second finds all of it there
        sampling.Mirror(made).catch_up(state)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / sampling.MIRROR)))
    read = optuna.load_study(study_name=tmp_path.name, storage=storage)
    best = decide.winner(made.settings, state)
    assert best is not None
    assert len(read.trials) == 12
    assert read.trials[best.trial].value == best.value
    assert {trial.state.name for trial in read.trials} == {"COMPLETE", "PRUNED", "FAIL"}
