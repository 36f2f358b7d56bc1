"""Other ways to a study: a function, Ray's search spaces, Optuna's own loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from drivetrain import RayTrainer
from drivetrain.compat import DistributedTuner
from drivetrain.core.errors import ConfigError
from drivetrain.tune import run_trial
from drivetrain.tune.settings import Objective, load_study
from drivetrain.tune.space import Choice, Float, Int, Space, from_dict, read_space

ROOT = Path(__file__).parents[2]
RATE = "optimization.learning_rate"


def own(**parameters: Any) -> Space:
    return from_dict({"parameters": parameters, "is_config": False})


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # set by the import, and taken back here
    return pytest.importorskip("ray.tune")


def test_a_search_space_of_rays(tune: Any) -> None:
    space = own(
        kind=tune.choice(["a", "b"]),
        rate=tune.loguniform(1e-4, 1e-1),
        decay=tune.uniform(0, 1),
        rounded=tune.quniform(0.1, 1, 0.1),
        size=tune.randint(1, 10),
        long=tune.lograndint(1, 100),
        even=tune.qrandint(1, 9, 2),
    )
    assert dict(space.parameters) == {
        "kind": Choice(("a", "b")),
        "rate": Float(1e-4, 1e-1, log=True),
        "decay": Float(0.0, 1.0),
        "rounded": Float(0.1, 1.0, step=0.1),
        "size": Int(1, 9),
        "long": Int(1, 99, log=True),
        "even": Int(2, 8, step=2),
    }
    assert from_dict(space.as_dict()) == space
    for wrong, said in (
        (tune.randn(0, 1), "tune.randn is unbounded"),
        (tune.sample_from(lambda _: 1), "tune.sample_from"),
        (tune.grid_search([1, 2]), "tune.grid_search tries every value"),
        (tune.qloguniform(1e-4, 1e-1, 1e-4), "cannot have steps"),
    ):
        with pytest.raises(ConfigError, match=said):
            own(x=wrong)


@pytest.mark.usefixtures("tune")
def test_rays_domains_in_a_python_file_are_held_against_the_config(tmp_path: Path) -> None:
    file = tmp_path / "space.py"
    file.write_text(f"from ray import tune\nSPACE = {{'{RATE}': tune.loguniform(1e-4, 1e-1)}}\n")
    assert read_space(file).parameters == {RATE: Float(1e-4, 1e-1, log=True)}
    file.write_text("from ray import tune\nSPACE = {'lr': tune.loguniform(1e-4, 1e-1)}\n")
    with pytest.raises(ConfigError, match="unknown key"):
        read_space(file)


def test_what_a_function_cannot_have_is_refused() -> None:
    for changes, said in (
        ({"rungs": (2,)}, "cannot be paused"),
        ({"metrics": "x"}, "metrics.*is not a setting of a study"),
        ({"metric": "time_s"}, "not for a function"),
        ({"further": (Objective("accuracy", "max"),)}, "one best trial"),
        ({"budget": "2h"}, "cannot be paused"),
        ({"num_gpus": 0}, "num_gpus = 0: must be at least 1"),
        ({"search_space": {"lr": {"low": 2, "high": 1}}}, "low is above high"),
    ):
        given: dict[str, Any] = {"train_fn": print, "search_space": {"lr": [1]}, **changes}
        with pytest.raises(ConfigError, match=said):
            DistributedTuner(**given)
    pytest.importorskip("optuna")
    with pytest.raises(ConfigError, match="trials rerun the script"):
        DistributedTuner(train_fn=print, search_space={"lr": [1]}).tune(num_samples=2)


def test_ray_trainer_takes_a_trials_config() -> None:
    """As `tune.run` hands it to a function; what is the model's own is left to the script."""
    config = {"hidden_size": 16, "lr": 0.5, "batch_size": 8, "num_workers": 2}
    trainer = RayTrainer(nn.Linear(2, 2), config)
    found = trainer.config
    assert (found.learning_rate, found.batch_size, found.num_gpus) == (0.5, 8, 2)
    with pytest.raises(ConfigError, match="num_workers = two"):
        RayTrainer(nn.Linear(2, 2), {"num_workers": "two"})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_function_is_tuned_by_starting_its_script_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script, study = str(ROOT / "tests/scripts/tuned_function.py"), tmp_path / "study"
    for _ in range(2):  # the second time all of it is there
        words = [sys.executable, script, str(study)]
        subprocess.run(words, check=True, capture_output=True, timeout=180)
    lines = (study / "best.txt").read_text().splitlines()
    assert len(lines) == 2, "trials end in tune()"
    assert lines[0] == lines[1]
    assert lines[0].startswith("['kind', 'rate', 'size']")
    assert not load_study(study).space.is_config


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_optunas_own_loop(tmp_path: Path) -> None:
    """A trial that goes on, one that its pruner ends at a rung, one whose loss is no number."""
    optuna = pytest.importorskip("optuna")
    script = str(ROOT / "tests/scripts/tuned_by_optuna.py")
    subprocess.run([sys.executable, script, str(tmp_path)], check=True, timeout=380)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "own.journal"))
    study = optuna.load_study(study_name="own", storage=optuna.storages.JournalStorage(backend))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL"]
    assert list(study.trials[0].intermediate_values) == [4, 12]
    assert study.trials[0].value == study.trials[0].intermediate_values[12]
    assert list(study.trials[1].intermediate_values) == [4]
    other = optuna.create_study(study_name="own")
    other.enqueue_trial({RATE: 0.003})
    space = Space({RATE: Choice((0.03, 0.003, 1e30))})
    with pytest.raises(ConfigError, match="contains a trial 0 with different values"):
        run_trial(other.ask(), ROOT / "tests/scripts/tuned.py", space, study=tmp_path / "own")
