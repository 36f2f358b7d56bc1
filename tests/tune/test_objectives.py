"""Several objectives: the front, what is drawn by it, what is shown of it, what is refused."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import tune as cli
from drivetrain.core.errors import ConfigError
from drivetrain.tune import decide, pareto, rows, sampling
from drivetrain.tune.journal import FILE, Ended, Journal, State
from drivetrain.tune.page import study_page
from drivetrain.tune.settings import Objective, Settings, Study, load_study, open_study
from drivetrain.tune.space import Float, Int, Space
from tests.tune.simulated import search

pytest.importorskip("optuna")
LONG = (pytest.mark.slow, pytest.mark.long)

DECAY, STEPS = "optimization.weight_decay", "optimization.warmup_steps"
SPACE = Space({DECAY: Float(0.0, 1.0), STEPS: Int(0, 90)})
BOTH = {"metric": "loss", "further": (Objective("accuracy", "max"),)}


def study(path: Path, **changes: Any) -> Study:
    given: dict[str, Any] = {"num_trials": 24, "generation": 6, "sampler": "nsgaii", **BOTH}
    return open_study(path, Settings("train.py", (), **{**given, **changes}), SPACE)


def trade(made: Study, work: decide.Work, state: State) -> Ended:
    """What is good for one is bad for the other; warm-up is bad for both."""
    values: Any = state.asked[work.trial].values
    if work.trial % 7 == 6:
        return Ended(work.trial, work.rung, "not_finite", reason="nan")
    loss = values[DECAY] ** 2 + values[STEPS] / 90
    accuracy = 1 - (values[DECAY] - 1) ** 2 - values[STEPS] / 90
    objectives = (loss, -accuracy if made.settings.further[0].mode == "min" else accuracy)
    return Ended(work.trial, work.rung, "done", 8, loss, objectives)


def test_the_front_is_what_every_pair_says(tmp_path: Path) -> None:
    settings = study(tmp_path).settings
    grid = list(product((0.0, 0.5, 0.5, 1.0, 2.0), (0.0, 1.0, 3.0, 3.0)))
    results = [
        Ended(number, 0, "done", 1, loss, (loss, accuracy + loss * 2 - 0.7 * number % 2))
        for number, (loss, accuracy) in enumerate(grid)
    ]
    kept = []
    for one in results:
        a, b = one.objectives
        if not any(
            x.objectives[0] <= a and x.objectives[1] >= b and x.objectives != (a, b)
            for x in results
        ):
            kept.append(one.trial)
    found = [each.trial for each in pareto.front(settings, [*results, Ended(99, 0, "failed")])]
    assert sorted(found) == kept
    assert 1 < len(found) < len(grid)
    losses = [results[trial].objectives[0] for trial in found]
    assert losses == sorted(losses)


@pytest.mark.parametrize("sampler", ["nsgaii", "tpe", "random"])
def test_the_same_front_on_any_number_of_workers_and_after_kills(
    tmp_path: Path, sampler: str
) -> None:
    ends = []
    for number, (workers, kills) in enumerate([(1, 0), (3, 0), (8, 0), (3, 8)]):
        made = study(tmp_path / str(number), sampler=sampler)
        state = search(made, trade, workers, seed=number, kills=kills)
        ends.append((state.asked, decide.best(made.settings, state)))
        assert decide.winner(made.settings, state) is None, "there is no single one"
    assert len(ends[0][1]) > 2
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=LONG)])
def test_samplers_go_by_the_mode_of_each_objective(tmp_path: Path, sampler: str) -> None:
    asked = []
    for mode in ("max", "min"):
        further = (Objective("accuracy", mode),)
        made = study(tmp_path / mode, sampler=sampler, further=further, num_trials=18)
        state = State()
        for _ in range(17):
            state.take(sampling.ask(made, state))
            work = decide.Work(len(state.asked) - 1, 0)
            end = trade(made, work, state)
            other = tuple(abs(each) for each in end.objectives)  # the same numbers, both ways
            state.take(Ended(work.trial, 0, end.outcome, 8, end.value, other))
        asked.append([each.values for each in state.asked])
    assert asked[0][:10] == asked[1][:10]
    assert asked[0][12:] != asked[1][12:]


def shown(tmp_path: Path) -> Study:
    made = study(tmp_path / "several", sampler="random")
    search(made, trade, 2, seed=0)
    return load_study(made.path)


def test_the_front_is_shown_listed_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = shown(tmp_path)
    front = decide.best(made.settings, Journal(made.path).state)
    cli.show(str(made.path), None)
    lines = capsys.readouterr().out.splitlines()
    assert f"{len(front)} on the Pareto front: loss " in lines[0]
    assert lines[1].split()[3:5] == ["loss", "accuracy"]
    marked = [line.split() for line in lines if line.endswith("*")]
    assert [int(words[0]) for words in marked] == [end.trial for end in front], "in front, in order"
    assert marked[0][4] == f"{front[0].objectives[1]:.6g}"
    cli.show(str(made.path), front[0].trial)
    assert "(on the Pareto front)" in capsys.readouterr().out
    cli.ls(str(made.path))
    assert "on the Pareto front" in capsys.readouterr().out
    found = rows.rows_of(made)
    table = list(csv.DictReader(rows.as_csv(found).splitlines()))
    assert list(table[0])[4:7] == ["loss", "accuracy", "is_best"]
    assert sum(row["is_best"] == "True" for row in table) == len(front)
    assert set(json.loads(rows.as_json(found))[0]["objectives"]) == {"loss", "accuracy"}
    with pytest.raises(ConfigError, match="no best trial"):
        cli.verify(str(made.path), None)


def test_the_page_has_the_front_drawn(tmp_path: Path) -> None:
    made = shown(tmp_path)
    page = study_page(made, 0.0)
    front = decide.best(made.settings, Journal(made.path).state)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles[:2] == ["Pareto front", "Parameters"]
    assert titles.count("History") == titles.count("Importance") == 2, "each objective by itself"
    assert f"{len(front)} trials are on the Pareto front" in page
    assert page.count('<tr class="chosen">') == len(front)
    first = page[page.index("Pareto front</h3>") : page.index("Parameters</h3>")]
    assert first.count('class="dot line-2"') == len(front)
    steps = re.search(r'class="line line-2" d="(.*?)"', first)
    assert steps is not None
    assert steps[1].count("V") == len(front) - 1
    three = (*BOTH["further"], Objective("time_s"))
    other = study(tmp_path / "three", further=three, sampler="random", num_trials=3)
    journal = Journal(other.path)
    for trial, values in enumerate(((1.0, 0.2, 9.0), (0.5, 0.1, 9.5), (2.0, 0.1, 9.6))):
        journal.write(sampling.ask(other, journal.state))
        journal.write(Ended(trial, 0, "done", 8, values[0], values))
    assert study_page(other, 0.0).count("<h3>Pareto front</h3>") == 3, "one for each pair"


def test_a_study_of_one_objective_is_written_as_before(tmp_path: Path) -> None:
    made = study(tmp_path, further=(), sampler="random")
    journal = Journal(made.path)
    journal.write(sampling.ask(made, journal.state))
    journal.write(Ended(0, 0, "done", 8, 0.5))
    assert "objectives" not in (tmp_path / FILE).read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rungs": (4,)}, "--rungs: needs one metric"),
        ({"rungs": (4,), "population": 6}, "--population: needs one metric"),
        ({"patience": 2}, "--patience: needs one metric"),
        ({"sampler": "cmaes"}, "cmaes: supports only one objective"),
        ({"sampler": "tpe", "warm_start": "x"}, "x: supports only one objective"),
        ({"further": (Objective("loss", "max"),)}, "is named twice"),
        ({"further": (), "metric": "time_s", "rungs": (4,)}, "searches for time_s"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        study(tmp_path, **changes)


def test_a_study_is_driven_without_its_verb_being_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drivetrain", "tune", "train.py", "--trials", "2"]
    command += ["--space", "none.yaml", "--objective", "loss", "--objective", "loss:up"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "--objective = loss: not NAME:min or NAME:max" in done.stderr + done.stdout
    assert done.returncode == ConfigError.exit_code


def test_objectives_as_they_are_typed() -> None:
    plain = {"script": "a.py", "script_args": (), "num_trials": 4, "rungs": ""}
    plain |= {"metric": "loss", "mode": "min"}
    made = cli.settings_from({**plain, "objectives": ["accuracy:max", "time_s"]})
    assert made.objectives == (Objective("accuracy", "max"), Objective("time_s", "min"))
    for changes, said in (
        ({"objectives": ["loss:up"]}, "not NAME:min or NAME:max"),
        ({"objectives": ["loss:min"], "metric": "accuracy"}, "leave --metric and --mode out"),
    ):
        with pytest.raises(ConfigError, match=said):
            cli.settings_from({**plain, **changes})
