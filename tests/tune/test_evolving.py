"""CMA-ES and NSGA-II: what they note with each trial is found again from the journal alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, DrivetrainError, EnvironmentProblem
from drivetrain.tune import decide, sampling
from drivetrain.tune.journal import FILE, Ended, Journal, State
from drivetrain.tune.settings import EVOLVING, Settings, Study, left_to_chance, open_study
from drivetrain.tune.space import Choice, Float, Int, Space
from tests.tune.simulated import search

pytest.importorskip("optuna")
pytest.importorskip("cmaes")

RATE, DECAY, STEPS = (
    "optimization.learning_rate",
    "optimization.weight_decay",
    "optimization.warmup_steps",
)
KIND, MOMENTUM = "optimization.optimizer", "optimization.momentum"
SPACE = Space(
    {RATE: Float(1e-4, 1e-1, log=True), DECAY: Float(0.0, 1.0), STEPS: Int(0, 90)},
    (f"{STEPS} != 3",),
)


def study(path: Path, space: Space = SPACE, **changes: Any) -> Study:
    given: dict[str, Any] = {"num_trials": 36, "generation": 6, "sampler": "cmaes"}
    return open_study(path, Settings("train.py", (), **{**given, **changes}), space)


def bowl(made: Study, work: decide.Work, state: State) -> Ended:
    """Its lowest point is off the middle; one trial in eleven fails."""
    values: Any = state.asked[work.trial].values
    if work.trial % 11 == 10:
        return Ended(work.trial, work.rung, "failed", reason="as it may")
    far = (values[DECAY] - 0.8) ** 2 + (values[STEPS] / 90 - 0.2) ** 2
    return Ended(work.trial, work.rung, "done", 4, far + abs(values[RATE] - 0.05))


@pytest.mark.parametrize("sampler", EVOLVING)
def test_the_same_trials_on_any_number_of_workers_and_after_kills(
    tmp_path: Path, sampler: str
) -> None:
    ends = []
    for number, (workers, kills) in enumerate([(1, 0), (2, 0), (8, 0), (3, 10)]):
        made = study(tmp_path / str(number), sampler=sampler)
        state = search(made, bowl, workers, seed=number, kills=kills)
        ends.append((state.asked, dict(sorted(state.ended.items()))))
    assert len(ends[0][0]) == 36
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("sampler", EVOLVING)
def test_generations_follow_from_each_other(tmp_path: Path, sampler: str) -> None:
    """Else the test above would show nothing: later ones are better than chance, and go on."""
    made = study(tmp_path, sampler=sampler, num_trials=72)
    state = search(made, bowl, 3, seed=0)
    values = [end.value for _, end in sorted(state.ended.items()) if end.value is not None]
    assert sum(values[-20:]) < 0.6 * sum(values[:20])
    noted = [note for notes in state.known.notes.values() for note in notes.items()]
    generations = {value for key, value in noted if key.endswith(":generation")}
    assert len(generations) >= 6, "where a trial failed, the sampler's takes another of the study's"
    assert not any("optimizer" in str(line) for line in (tmp_path / FILE).read_text().splitlines())


def test_an_eager_study_is_resumed_from_the_order_of_its_journal(tmp_path: Path) -> None:
    made = study(tmp_path, schedule="eager", num_trials=30)
    state = search(made, bowl, 3, seed=1, kills=6)
    assert len(state.asked) == 30
    again = sampling._noted_again(made)  # refuses what is drawn otherwise
    assert [each.get("cma:generation") for each in again.values()] == [
        each.get("cma:generation") for each in state.known.notes.values()
    ]


def test_other_draws_than_the_journals_are_refused(tmp_path: Path) -> None:
    made = study(tmp_path, num_trials=12)
    search(made, bowl, 1, seed=0)
    lines = (tmp_path / FILE).read_text().splitlines()
    changed = json.loads(lines[0])
    changed["values"][DECAY] = 0.123
    (tmp_path / FILE).write_text("\n".join([json.dumps(changed), *lines[1:], ""]))
    longer = study(tmp_path, num_trials=18)
    with pytest.raises(DrivetrainError, match="trial 0 was drawn with .* cannot continue"):
        sampling.ask(longer, Journal(tmp_path).state)


def test_what_is_left_to_chance_is_said_and_a_space_of_nothing_else_refused(tmp_path: Path) -> None:
    space = Space(
        {
            KIND: Choice(("adamw", "sgd")),
            MOMENTUM: Float(0.0, 0.9, when={KIND: ("sgd",)}),
            DECAY: Float(0.0, 1.0),
        }
    )
    by_sampler = {
        name: left_to_chance(Settings("train.py", (), 1, sampler=name), space)
        for name in ("tpe", "gp", "cmaes", "nsgaii")
    }
    some = [MOMENTUM]
    assert by_sampler == {"tpe": [], "gp": some, "cmaes": [KIND, MOMENTUM], "nsgaii": some}
    with pytest.raises(ConfigError, match="cmaes: searches only ranges that every trial has"):
        study(tmp_path, Space({KIND: Choice(("adamw", "sgd"))}))
    with pytest.raises(ConfigError, match="uses no results but its own generations'"):
        study(tmp_path, warm_start="studies/old")


def test_a_missing_library_is_named_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    settings = Settings("train.py", (), 8, sampler="cmaes")
    with pytest.raises(EnvironmentProblem, match=r"cmaes: .*pip install .*\[tune\]'"):
        sampling.require_libraries(settings)
