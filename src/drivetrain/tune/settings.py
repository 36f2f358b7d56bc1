"""Settings: everything but the script that decides a study's result. Written once, then compared.

How many trials run at a time, and where, is not among them: it does not change the result of a
deterministic study.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from drivetrain.core.bounded import read_json
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.files import write_whole
from drivetrain.tune import STUDY_FILE
from drivetrain.tune.by_number import grid
from drivetrain.tune.journal import read_journal
from drivetrain.tune.perturb import Rule, key_problems
from drivetrain.tune.space import Choice, Space, from_dict

Stopping = Literal["successive-halving", "hyperband", "median", "none"]
Mode = Literal["min", "max"]
EVOLVING = ("cmaes", "nsgaii")
"""Samplers that evolve generations; one of their generations is one of the study's."""


MEASURED = ("time_s", "cost")
"""Objectives that are not metrics: seconds of training, and the cost of the devices."""


@dataclass(frozen=True)
class Objective:
    """One of several objectives of a study."""

    metric: str
    mode: Mode = "min"


@dataclass(frozen=True)
class Settings:
    """The settings of one study."""

    script: str
    script_args: tuple[str, ...]
    num_trials: int
    processes_per_trial: int = 1
    metric: str = "loss"
    mode: Mode = "min"
    further: tuple[Objective, ...] = ()
    """Objectives in addition to the metric. The study then has a Pareto front, not a best trial."""
    sampler: Literal["tpe", "random", "gp", "cmaes", "nsgaii", "qmc", "grid"] = "tpe"
    seed: int = 0
    schedule: Literal["deterministic", "eager"] = "deterministic"
    generation: int = 8
    """Number of trials that are drawn from the same results, and compete at the same rungs."""
    rungs: tuple[int, ...] = ()
    """Steps after which trials stop and the best continue; the last rung is the run's end."""
    factor: int = 3
    """One in this many trials continues at a rung."""
    stopping: Stopping = "successive-halving"
    """Rule for which trials continue at a rung."""
    promote: Literal["pause", "stop"] = "pause"
    """pause: trials wait for each other at a rung. stop: each continues or ends at once, judged by
    the results of earlier generations."""
    patience: int | None = None
    """Evaluations without improvement after which a trial ends."""
    warm_start: str = ""
    """A study whose finished trials the sampler knows, as they were when this study began."""
    max_restarts: int = 3
    """Restarts of one trial's supervisor if it is killed; it restarts training failures itself."""
    nodes_per_trial: int = 1
    cluster: str = ""
    """Cluster for the planner: trials that cannot fit are not started. Empty: all are."""
    budget: str = ""
    """12h (device-hours), 200USD or 1e18flops: no run starts that would exceed it."""
    population: int = 0
    """Members that train in parallel and fork from each other at the rungs; 0: no population."""
    quantile: float = 0.25
    """Fraction of a population that is replaced at each rung, and that are donors."""
    explore: Literal["perturb", "pb2"] = "perturb"
    """How a fork gets its values: its donor's, changed at random, or numbers from a Gaussian
    process over the members' gains so far."""
    perturb: tuple[float, float] = (0.8, 1.2)
    """A fork's numbers are its donor's times one of these."""
    resample: float = 0.25
    """Probability that a fork's value is drawn from its range instead."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All objectives; usually one."""
        return (Objective(self.metric, self.mode), *self.further)

    @property
    def is_measured(self) -> bool:
        """Whether an objective differs on each run of the same trial."""
        return any(each.metric in MEASURED for each in self.objectives)

    @property
    def num_rungs(self) -> int:
        """Number of rungs; the end of the run is one."""
        return len(self.rungs) + 1

    @property
    def asks_by_results(self) -> bool:
        """Whether a trial's values depend on results of earlier ones."""
        return self.sampler in ("tpe", "gp", *EVOLVING)

    @property
    def num_replaced(self) -> int:
        """Number of members of a population that are replaced at each rung."""
        return max(1, int(self.population * self.quantile))

    @property
    def perturbing(self) -> Rule:
        """The rule that perturbs a donor's values."""
        return Rule(self.perturb, self.resample)

    @property
    def waits_for_results(self) -> bool:
        """Whether a trial is drawn only once all earlier generations are over."""
        return self.asks_by_results or self.promote == "stop"

    def generation_of(self, trial: int) -> range:
        """The trials that compete with this one, itself included."""
        first = trial - trial % self.generation
        return range(first, min(first + self.generation, self.num_trials))


@dataclass(frozen=True)
class Study:
    """Settings and space, in a directory."""

    path: Path
    settings: Settings
    space: Space

    def run_dir(self, trial: int) -> Path:
        """The run directory of a trial."""
        return self.path / "trials" / f"{trial:05d}"


def checked_settings(values: Mapping[str, Any], flag: str = "") -> Settings:
    """Validate the values; ConfigError names each wrong one, prefixed by `flag`."""
    try:
        return TypeAdapter(Settings).validate_python(dict(values))
    except ValidationError as error:
        raise ConfigError(
            [
                Problem(f"{flag}{each['loc'][0]}", each["msg"].lower(), "correct it", each["input"])
                for each in error.errors()
            ]
        ) from None


def problems(settings: Settings) -> list[Problem]:
    """Problems with the settings."""
    found = []
    for flag, value in (
        ("--trials", settings.num_trials),
        ("--nproc-per-trial", settings.processes_per_trial),
        ("--generation", settings.generation),
    ):
        if value < 1:
            found.append(Problem(flag, "must be at least 1", f"{flag} 8", value))
    if settings.factor < 2:
        found.append(Problem("--factor", "must be at least 2", "--factor 3", settings.factor))
    if settings.patience is not None and settings.patience < 1:
        found.append(Problem("--patience", "must be at least 1", "--patience 3", settings.patience))
    if settings.warm_start and settings.sampler not in ("tpe", "gp"):
        what = "results but its own generations'" if settings.sampler in EVOLVING else "results"
        rule, remedy = f"--sampler {settings.sampler} uses no {what}", "use --sampler tpe"
        found.append(Problem("--warm-start", rule, remedy, settings.warm_start))
    return found + _objective_problems(settings) + _rung_problems(settings)


def _objective_problems(settings: Settings) -> list[Problem]:
    """Problems with options that need a single objective or a metric of the evaluations."""
    names = [each.metric for each in settings.objectives]
    shown = ", ".join(names)
    if len(set(names)) < len(names):
        return [Problem("--objective", "is named twice", "name each once", shown)]
    if not settings.further and settings.metric not in MEASURED:
        return []
    why = f"needs one metric of the evaluations, but the study searches for {shown}"
    remedy = "leave it out, or give --metric with one of the evaluations' only"
    flags = {
        "--rungs": bool(settings.rungs),
        "--population": bool(settings.population),
        "--patience": settings.patience is not None,
    }
    found = [Problem(name, why, remedy, has_value=False) for name, said in flags.items() if said]
    if settings.further and settings.sampler == "cmaes":
        rule, remedy = "supports only one objective", "use --sampler nsgaii, tpe or gp"
        found.append(Problem("--sampler", rule, remedy, settings.sampler))
    if settings.further and settings.warm_start:
        rule, remedy = "supports only one objective", "leave it out"
        found.append(Problem("--warm-start", rule, remedy, settings.warm_start))
    return found


def _rung_problems(settings: Settings) -> list[Problem]:
    found, rungs = [], settings.rungs
    if any(step < 1 for step in rungs) or list(rungs) != sorted(set(rungs)):
        shown = ",".join(map(str, rungs))
        found.append(Problem("--rungs", "must be increasing steps", "--rungs 20,60", shown))
    if settings.population:
        return [*found, *_population_problems(settings)]
    if settings.explore != "perturb":
        rule = "applies only to a population"
        found.append(Problem("--explore", rule, "add --population 8", settings.explore))
    if rungs and settings.stopping == "none":
        rule, remedy = "decides nothing at --rungs", "leave --rungs out"
        found.append(Problem("--stopping", rule, remedy, settings.stopping))
    if not rungs and settings.stopping in ("hyperband", "median"):
        found.append(Problem("--stopping", "needs --rungs", "add --rungs 20,60", settings.stopping))
    if not rungs and settings.promote == "stop":
        found.append(Problem("--promote", "needs --rungs", "add --rungs 20,60", settings.promote))
    if settings.promote == "stop" and settings.num_trials <= settings.generation:
        rule = f"the first generation ({settings.generation}) trains to its end; no other follows"
        remedy = "use more --trials, a smaller --generation, or --promote pause"
        found.append(Problem("--promote", rule, remedy, settings.promote))
    if settings.stopping == "hyperband" and settings.generation <= len(rungs):
        rule = f"{settings.generation} trials leave some of the {len(rungs) + 1} brackets empty"
        found.append(Problem("--generation", rule, "use a larger one", settings.generation))
    is_halving = settings.stopping == "successive-halving" and settings.promote == "pause"
    if rungs and is_halving and settings.generation < settings.factor:
        rule = f"{settings.generation} trials are fewer than --factor {settings.factor}"
        found.append(Problem("--generation", rule, "use a larger one", settings.generation))
    return found


def _population_problems(settings: Settings) -> list[Problem]:
    found = []
    if settings.population < 2:
        rule = "a single member has no other to fork from"
        found.append(Problem("--population", rule, "--population 8", settings.population))
    if not settings.rungs:
        rule = "a population needs steps at which members are compared"
        found.append(Problem("--rungs", rule, "--rungs 100,200,300", has_value=False))
    if not 0 < settings.quantile <= 0.5:
        rule = "must be above 0, and at most 0.5"
        found.append(Problem("--quantile", rule, "--quantile 0.25", settings.quantile))
    if not 0 < settings.perturb[0] < 1 < settings.perturb[1]:
        shown = ",".join(map(str, settings.perturb))
        rule = "must be two factors, one below 1 and one above"
        found.append(Problem("--perturb", rule, "--perturb 0.8,1.2", shown))
    if not 0 <= settings.resample <= 1:
        found.append(Problem("--resample", "must be from 0 to 1", "0.25", settings.resample))
    if settings.schedule != "deterministic":
        rule, remedy = "members are compared once all have arrived", "leave it out"
        found.append(Problem("--schedule", rule, remedy, settings.schedule))
    return found


def open_study(path: Path, settings: Settings, space: Space) -> Study:
    """Write a new study, or check that the existing one has these settings."""
    unfit = key_problems(space) if settings.population else []
    unfit += [*_grid_problems(settings, space), *_number_problems(settings, space)]
    if found := [*problems(settings), *_said_twice(settings, space), *unfit]:
        raise ConfigError(found)
    if (path / STUDY_FILE).exists():
        before = load_study(path)
        _refuse_changes(before, settings, space, _may_change(path))
    study = Study(path, settings, space)
    document = {"settings": dataclasses.asdict(settings), "space": space.as_dict()}
    write_whole(path / STUDY_FILE, json.dumps(document, indent=2) + "\n", sync=True)
    return study


def _grid_problems(settings: Settings, space: Space) -> list[Problem]:
    if settings.sampler != "grid" or (size := len(grid(space))) == settings.num_trials:
        return []
    rule = f"the grid has {size} combinations"
    return [Problem("--trials", rule, "leave it out", settings.num_trials)]


def _number_problems(settings: Settings, space: Space) -> list[Problem]:
    if space.numbers:
        return []
    rule = "searches only ranges that every trial has, and the space has none"
    found = []
    if settings.sampler == "cmaes":
        found.append(Problem("--sampler", rule, "use --sampler tpe", settings.sampler))
    if settings.explore == "pb2":
        found.append(Problem("--explore", rule, "use --explore perturb", settings.explore))
    return found


def left_to_chance(settings: Settings, space: Space) -> list[str]:
    """Keys that the sampler draws at random, independent of the results."""
    return [
        key
        for key, parameter in space.parameters.items()
        if (settings.sampler in (*EVOLVING, "gp") and parameter.when)
        or (settings.sampler == "cmaes" and isinstance(parameter, Choice))
    ]


def left_to_perturb(settings: Settings, space: Space) -> list[str]:
    """Keys that pb2's model does not choose."""
    if settings.explore != "pb2":
        return []
    return [key for key in space.parameters if key not in space.numbers]


def _said_twice(settings: Settings, space: Space) -> list[Problem]:
    """Problems for searched keys that the script's arguments also set."""
    said = {word.partition("=")[0] for word in settings.script_args if "=" in word}
    rule, remedy = "is searched, and also set for every trial", "leave one of them out"
    found = said & set(space.parameters)
    return [Problem(key, rule, remedy, has_value=False) for key in sorted(found)]


def load_study(path: Path) -> Study:
    """Read the study in a directory."""
    file = path / STUDY_FILE
    try:
        document = read_json(file)
        settings = TypeAdapter(Settings).validate_python(document["settings"])
        return Study(path, settings, from_dict(document["space"]))
    except FileNotFoundError:
        rule = f"contains no study (no {STUDY_FILE})"
        remedy = "create one with drivetrain tune SCRIPT --space …"
        raise ConfigError([Problem("STUDY", rule, remedy, str(path))]) from None
    except (ValidationError, KeyError, TypeError, ConfigError) as error:
        raise DamagedRun(f"{file}: not a study ({' '.join(str(error).split())[:200]})") from None


def _may_change(path: Path) -> set[str]:
    """Settings that may change; the metric too, as long as no trial has been compared by it."""
    told = {"num_trials", "budget"}
    return told if read_journal(path).ended else told | {"metric", "mode", "further"}


def _refuse_changes(
    before: Study, settings: Settings, space: Space, may_change: Collection[str]
) -> None:
    old, new = _flat(before.settings, before.space), _flat(settings, space)
    found = [
        Problem(
            key,
            f"was {old[key]!r} when the study began",
            "use another --study, or that value",
            new[key],
        )
        for key in old
        if old[key] != new[key] and key not in may_change
    ]
    had = before.settings.num_trials
    if settings.num_trials < had:
        found.append(
            Problem("--trials", f"the study has {had}", "use at least as many", settings.num_trials)
        )
    elif settings.num_trials > had and had % settings.generation:
        rule = f"the study's {had} trials end within a generation, which has already been judged"
        remedy = f"use another --study; a generation has {settings.generation} trials"
        found.append(Problem("--trials", rule, remedy, settings.num_trials))
    if found:
        raise ConfigError(found)


def _flat(settings: Settings, space: Space) -> Mapping[str, Any]:
    values = dataclasses.asdict(settings)
    return {**values, "space": json.dumps(space.as_dict())}
