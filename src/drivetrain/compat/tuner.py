"""DistributedTuner: a search over a function's argument, in one call.

    tuner = DistributedTuner(train_fn=train, search_space={"lr": tune.loguniform(1e-4, 1e-1)})
    best_params = tuner.tune(num_samples=100)

Each trial is a run of the script that calls this: it is started again from its top, with nothing to
pickle, and comes to `tune()`, which there calls the function with the trial's values and ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.launch.target import target_type
from drivetrain.record.reading import open_run
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import RUN_DIR
from drivetrain.tune.driver import Driver
from drivetrain.tune.journal import Ended, read_journal
from drivetrain.tune.places import places_for
from drivetrain.tune.sampling import require_libraries
from drivetrain.tune.settings import MEASURED, Settings, Study, checked_settings, open_study
from drivetrain.tune.space import Space, from_dict
from drivetrain.tune.trial_run import VALUES, Runner, local_job

_NOT_FOR_FUNCTIONS = (
    "rungs",
    "patience",
    "promote",
    "stopping",
    "processes_per_trial",
    "warm_start",
    "cluster",
    "budget",
)
TrainFunction = Callable[[dict[str, Any]], Any]


class DistributedTuner:
    """A function, a space, `tune(num_samples)`: the best values.

    Args:
        train_fn: `train_fn(values)`; returns the metric, a dict with it, or None if it trains with
            Drivetrain: then the run's last evaluation counts.
        search_space: Names and what they may be: a list, {low: …, high: …}, a `Float`, `Int` or
            `Choice`, one of Ray Tune's domains, or a plain value that stays.
        num_gpus: Devices that trials may take; on a machine without any, trials at a time.
        trials_per_gpu: Trials at a time on each.
        study: The study's directory; the same script resumes it. studies/<script> when left out.
        settings: Any of a study's: metric, mode, sampler, seed, generation, schedule …
    """

    def __init__(
        self,
        train_fn: TrainFunction,
        search_space: Mapping[str, Any],
        num_gpus: int = 1,
        trials_per_gpu: int = 1,
        study: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self._train_fn = train_fn
        self._space = _space_of(search_space)
        self._num_parallel = num_gpus * trials_per_gpu
        self._path = study
        self._settings = settings
        self.study: Study | None = None
        """After tune(): all of it, for `drivetrain tune show` and the like."""
        self.best: Ended | None = None
        _refuse(num_gpus, trials_per_gpu, settings)

    def tune(self, num_samples: int) -> dict[str, Any]:
        """Search; the values of the best of so many trials."""
        if VALUES in os.environ:
            self._as_trial(json.loads(os.environ[VALUES]))
        script = _this_script()
        own = {"script": str(script), "script_args": tuple(sys.argv[1:])}
        settings = checked_settings({**self._settings, **own, "num_trials": num_samples})
        require_libraries(settings)
        path = Path(self._path or f"studies/{script.stem}")
        self.study = open_study(path, settings, self._space)
        target, job = target_type("local")(), local_job(self.study)
        runner = Runner(self.study, target, job, places_for(target, job, self._num_parallel))
        self.best = Driver(self.study, runner, self._num_parallel, _say).run()
        if self.best is None:
            raise DrivetrainError(f"no trial has come to a value; see {path}")
        return dict(read_journal(path).asked[self.best.trial].values)

    def _as_trial(self, values: dict[str, Any]) -> NoReturn:
        """What is left of the script after tune() is the driver's."""
        found = self._train_fn(values)
        if found is not None:
            metric = self._settings.get("metric", "loss")
            _record(metric, _value_of(found, metric))
        raise SystemExit(0)


def _space_of(said: Mapping[str, Any]) -> Space:
    """A plain value in it is a choice of one."""
    plain = bool | int | float | str | None
    filled = {key: [each] if isinstance(each, plain) else each for key, each in said.items()}
    return from_dict({"parameters": filled, "is_config": False})


def _refuse(num_gpus: int, trials_per_gpu: int, settings: Mapping[str, Any]) -> None:
    problems = [
        Problem(name, "must be at least 1", "1", value)
        for name, value in (("num_gpus", num_gpus), ("trials_per_gpu", trials_per_gpu))
        if value < 1
    ]
    for name in _NOT_FOR_FUNCTIONS:
        if name in settings:
            rule = "a function cannot be paused, spread, planned or warm-started from outside"
            remedy = "write it as a script with load_config(), and use `drivetrain tune`"
            problems.append(Problem(name, rule, remedy, settings[name]))
    if settings.get("further"):
        rule, remedy = (
            "tune() returns the values of one best trial",
            "`drivetrain tune --objective`",
        )
        problems.append(Problem("further", rule, remedy, has_value=False))
    if settings.get("metric") in MEASURED:
        rule, remedy = "is measured of runs, not of a function", "return it as another metric"
        problems.append(Problem("metric", rule, remedy, settings["metric"]))
    known = Settings.__dataclass_fields__.keys() - {"script", "script_args", "num_trials"}
    for name in settings.keys() - known:
        problems.append(Problem(name, "is no setting of a study", ", ".join(sorted(known))))
    if problems:
        raise ConfigError(problems)


def _this_script() -> Path:
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or "pytest" in sys.modules:
        rule = "trials start the script again, and there is none"
        remedy = "save it as a file and run it with python"
        raise ConfigError([Problem("DistributedTuner", rule, remedy, has_value=False)])
    return Path(file).resolve()


def _value_of(found: Any, metric: str) -> float:
    value: Any = found.get(metric) if isinstance(found, Mapping) else found
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        there = f"a dict with {', '.join(map(str, found))}" if isinstance(found, Mapping) else found
        rule, remedy = f"returned {there}", f"return a number, or a dict with {metric!r}"
        raise ConfigError([Problem("train_fn", rule, remedy, has_value=False)])
    return float(value)


def _record(metric: str, value: float) -> None:
    """As an evaluation of the run, after the last step that it has."""
    directory = RunDirectory.at(Path(os.environ[RUN_DIR]))
    known = open_run(directory.path).scalars().values() if directory.events(0).exists() else ()
    step = max((int(series.steps[-1]) for series in known if len(series)), default=1)
    with Recorder(directory.events(0)) as recorder:
        recorder.scalars(step, {f"val/{metric}": value})


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
