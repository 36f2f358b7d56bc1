"""DistributedTuner: hyperparameter search for a training function, in one call.

    tuner = DistributedTuner(train_fn=train, search_space={"lr": tune.loguniform(1e-4, 1e-1)})
    best_params = tuner.tune(num_samples=100)

Each trial reruns the script that calls this from its top, so nothing has to be pickled. In a trial,
`tune()` calls the function with the trial's values and then ends the script.
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
    """Searches for the best values of a function's arguments: `tune(num_samples)`.

    Args:
        train_fn: `train_fn(values)` returns the metric, a dict that contains it, or None if it
            trains with Drivetrain; the run's last evaluation is then used.
        search_space: Maps names to what they may be: a list, {low: …, high: …}, a `Float`, `Int` or
            `Choice`, one of Ray Tune's domains, or a constant.
        num_gpus: Number of devices for trials; on a machine without devices, parallel trials.
        trials_per_gpu: Parallel trials per device.
        study: The study's directory; the same script resumes it. Default: studies/<script>.
        settings: Any setting of a study: metric, mode, sampler, seed, generation, schedule …
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
        """The whole study after tune(), for `drivetrain tune show` and similar commands."""
        self.best: Ended | None = None
        _refuse(num_gpus, trials_per_gpu, settings)

    def tune(self, num_samples: int) -> dict[str, Any]:
        """Run `num_samples` trials and return the values of the best one."""
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
            raise DrivetrainError(f"no trial has reported a value; see {path}")
        return dict(read_journal(path).asked[self.best.trial].values)

    def _as_trial(self, values: dict[str, Any]) -> NoReturn:
        """Run one trial and exit: the rest of the script after tune() is for the driver only."""
        found = self._train_fn(values)
        if found is not None:
            metric = self._settings.get("metric", "loss")
            _record(metric, _value_of(found, metric))
        raise SystemExit(0)


def _space_of(said: Mapping[str, Any]) -> Space:
    """Convert the search space; a constant is a choice of one value."""
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
            rule = "a function cannot be paused, distributed, planned or warm-started from outside"
            remedy = "write it as a script with load_config(), and use `drivetrain tune`"
            problems.append(Problem(name, rule, remedy, settings[name]))
    if settings.get("further"):
        rule, remedy = (
            "tune() returns the values of one best trial",
            "`drivetrain tune --objective`",
        )
        problems.append(Problem("further", rule, remedy, has_value=False))
    if settings.get("metric") in MEASURED:
        rule, remedy = "is measured for runs, not for a function", "return it as another metric"
        problems.append(Problem("metric", rule, remedy, settings["metric"]))
    known = Settings.__dataclass_fields__.keys() - {"script", "script_args", "num_trials"}
    for name in settings.keys() - known:
        problems.append(Problem(name, "is not a setting of a study", ", ".join(sorted(known))))
    if problems:
        raise ConfigError(problems)


def _this_script() -> Path:
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or "pytest" in sys.modules:
        rule = "trials rerun the script, but there is none"
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
    """Record the value as an evaluation of the run, at its last recorded step."""
    directory = RunDirectory.at(Path(os.environ[RUN_DIR]))
    known = open_run(directory.path).scalars().values() if directory.events(0).exists() else ()
    step = max((int(series.steps[-1]) for series in known if len(series)), default=1)
    with Recorder(directory.events(0)) as recorder:
        recorder.scalars(step, {f"val/{metric}": value})


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
