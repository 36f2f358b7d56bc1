"""Settings: what decides a study's result, besides the script. Written once, compared after that.

How many trials run at a time, and where, is not among them: in a deterministic study that changes
nothing.
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
"""Samplers whose generations follow from each other; one of theirs is one of the study's."""


MEASURED = ("time_s", "cost")
"""Objectives that are no metrics: seconds of training, and what the devices cost meanwhile."""


@dataclass(frozen=True)
class Objective:
    """One of several things that a study looks for."""

    metric: str
    mode: Mode = "min"


@dataclass(frozen=True)
class Settings:
    """One study."""

    script: str
    script_args: tuple[str, ...]
    num_trials: int
    processes_per_trial: int = 1
    metric: str = "loss"
    mode: Mode = "min"
    further: tuple[Objective, ...] = ()
    """Objectives beside the metric. There is no best trial then but a Pareto front."""
    sampler: Literal["tpe", "random", "gp", "cmaes", "nsgaii", "qmc", "grid"] = "tpe"
    seed: int = 0
    schedule: Literal["deterministic", "eager"] = "deterministic"
    generation: int = 8
    """Trials that are asked for knowing the same results, and compete at the same rungs."""
    rungs: tuple[int, ...] = ()
    """Steps after which trials stop and the best go on; the last rung is the run's own end."""
    factor: int = 3
    """One of so many goes on."""
    stopping: Stopping = "successive-halving"
    """Who goes on at a rung."""
    promote: Literal["pause", "stop"] = "pause"
    """pause: trials wait at a rung for each other. stop: each goes straight on, or ends, by the
    results of earlier generations."""
    patience: int | None = None
    """Evaluations without a better one, after which a trial ends."""
    warm_start: str = ""
    """A study whose finished trials are told first, as they were when this one began."""
    max_restarts: int = 3
    """Of one trial's supervisor, if it is killed; what fails in training it restarts itself."""
    nodes_per_trial: int = 1
    cluster: str = ""
    """Where trials run, for the planner: those that cannot fit are not started. Empty: all are."""
    budget: str = ""
    """12h (device-hours), 200USD or 1e18flops: nothing begins that would exceed it."""
    population: int = 0
    """Members that train side by side and fork from each other at the rungs; 0: no population."""
    quantile: float = 0.25
    """Of a population: how many are left at each rung, and how many are their donors."""
    explore: Literal["perturb", "pb2"] = "perturb"
    """How a fork comes by its values: its donor's, changed by chance; or numbers by what members
    have gained so far, with a Gaussian process."""
    perturb: tuple[float, float] = (0.8, 1.2)
    """A fork's numbers are its donor's times one of these."""
    resample: float = 0.25
    """How likely a fork's value is drawn anew instead."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All of them; mostly there is one."""
        return (Objective(self.metric, self.mode), *self.further)

    @property
    def is_measured(self) -> bool:
        """Whether an objective is another one on each run of the same trial."""
        return any(each.metric in MEASURED for each in self.objectives)

    @property
    def num_rungs(self) -> int:
        """The run's end is one."""
        return len(self.rungs) + 1

    @property
    def asks_by_results(self) -> bool:
        """Whether a trial's values depend on results of earlier ones."""
        return self.sampler in ("tpe", "gp", *EVOLVING)

    @property
    def num_replaced(self) -> int:
        """Of a population, at each rung."""
        return max(1, int(self.population * self.quantile))

    @property
    def perturbing(self) -> Rule:
        """What a fork does with its donor's values."""
        return Rule(self.perturb, self.resample)

    @property
    def waits_for_results(self) -> bool:
        """Whether a trial is asked for only once all earlier generations are over."""
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
        """A trial is a run."""
        return self.path / "trials" / f"{trial:05d}"


def checked_settings(values: Mapping[str, Any], flag: str = "") -> Settings:
    """Each value of its kind, or a ConfigError that names them, with `flag` in front."""
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
    """Numbers that make no study."""
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
        rule, remedy = f"--sampler {settings.sampler} goes by no {what}", "--sampler tpe"
        found.append(Problem("--warm-start", rule, remedy, settings.warm_start))
    return found + _objective_problems(settings) + _rung_problems(settings)


def _objective_problems(settings: Settings) -> list[Problem]:
    """What goes by one value of a trial, or by a metric of its evaluations."""
    names = [each.metric for each in settings.objectives]
    shown = ", ".join(names)
    if len(set(names)) < len(names):
        return [Problem("--objective", "named twice", "each once", shown)]
    if not settings.further and settings.metric not in MEASURED:
        return []
    why = f"goes by one metric of the evaluations, and the study looks for {shown}"
    remedy = "leave it out, or --metric with one of the evaluations' alone"
    flags = {
        "--rungs": bool(settings.rungs),
        "--population": bool(settings.population),
        "--patience": settings.patience is not None,
    }
    found = [Problem(name, why, remedy, has_value=False) for name, said in flags.items() if said]
    if settings.further and settings.sampler == "cmaes":
        rule, remedy = "searches for one objective", "--sampler nsgaii, tpe or gp"
        found.append(Problem("--sampler", rule, remedy, settings.sampler))
    if settings.further and settings.warm_start:
        rule, remedy = "tells one objective of each trial", "leave it out"
        found.append(Problem("--warm-start", rule, remedy, settings.warm_start))
    return found


def _rung_problems(settings: Settings) -> list[Problem]:
    found, rungs = [], settings.rungs
    if any(step < 1 for step in rungs) or list(rungs) != sorted(set(rungs)):
        shown = ",".join(map(str, rungs))
        found.append(Problem("--rungs", "must be steps that rise", "--rungs 20,60", shown))
    if settings.population:
        return [*found, *_population_problems(settings)]
    if settings.explore != "perturb":
        rule = "says how forks of a population come by their values"
        found.append(Problem("--explore", rule, "--population 8", settings.explore))
    if rungs and settings.stopping == "none":
        rule, remedy = "nothing is decided at --rungs then", "leave --rungs out"
        found.append(Problem("--stopping", rule, remedy, settings.stopping))
    if not rungs and settings.stopping in ("hyperband", "median"):
        found.append(Problem("--stopping", "needs --rungs", "--rungs 20,60", settings.stopping))
    if not rungs and settings.promote == "stop":
        found.append(Problem("--promote", "needs --rungs", "--rungs 20,60", settings.promote))
    if settings.promote == "stop" and settings.num_trials <= settings.generation:
        rule = f"the first generation ({settings.generation}) goes on to its end; no other follows"
        remedy = "more --trials, a smaller --generation, or --promote pause"
        found.append(Problem("--promote", rule, remedy, settings.promote))
    if settings.stopping == "hyperband" and settings.generation <= len(rungs):
        rule = f"of {settings.generation} trials none is left for some of {len(rungs) + 1} brackets"
        found.append(Problem("--generation", rule, "a larger one", settings.generation))
    is_halving = settings.stopping == "successive-halving" and settings.promote == "pause"
    if rungs and is_halving and settings.generation < settings.factor:
        rule = f"of {settings.generation} trials none is one of {settings.factor}"
        found.append(Problem("--generation", rule, "a larger one", settings.generation))
    return found


def _population_problems(settings: Settings) -> list[Problem]:
    found = []
    if settings.population < 2:
        rule = "one alone has nobody to fork from"
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
        rule, remedy = "a population is compared once all members are there", "leave it out"
        found.append(Problem("--schedule", rule, remedy, settings.schedule))
    return found


def open_study(path: Path, settings: Settings, space: Space) -> Study:
    """Write a new study down, or see that the one that is there is this one."""
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
    rule = "searches numbers that every trial has, and the space has none"
    found = []
    if settings.sampler == "cmaes":
        found.append(Problem("--sampler", rule, "--sampler tpe", settings.sampler))
    if settings.explore == "pb2":
        found.append(Problem("--explore", rule, "--explore perturb", settings.explore))
    return found


def left_to_chance(settings: Settings, space: Space) -> list[str]:
    """Keys that the sampler draws at random, whatever the results are."""
    return [
        key
        for key, parameter in space.parameters.items()
        if (settings.sampler in (*EVOLVING, "gp") and parameter.when)
        or (settings.sampler == "cmaes" and isinstance(parameter, Choice))
    ]


def left_to_perturb(settings: Settings, space: Space) -> list[str]:
    """Keys that a fork's model does not choose."""
    if settings.explore != "pb2":
        return []
    return [key for key in space.parameters if key not in space.numbers]


def _said_twice(settings: Settings, space: Space) -> list[Problem]:
    """Words for every trial that the study's own would overrule."""
    said = {word.partition("=")[0] for word in settings.script_args if "=" in word}
    rule, remedy = "is searched, and given for every trial", "leave one of them out"
    found = said & set(space.parameters)
    return [Problem(key, rule, remedy, has_value=False) for key in sorted(found)]


def load_study(path: Path) -> Study:
    """The study in a directory."""
    file = path / STUDY_FILE
    try:
        document = read_json(file)
        settings = TypeAdapter(Settings).validate_python(document["settings"])
        return Study(path, settings, from_dict(document["space"]))
    except FileNotFoundError:
        rule = f"holds no study (no {STUDY_FILE})"
        remedy = "drivetrain tune SCRIPT --space … makes one"
        raise ConfigError([Problem("STUDY", rule, remedy, str(path))]) from None
    except (ValidationError, KeyError, TypeError, ConfigError) as error:
        raise DamagedRun(f"{file}: not a study ({' '.join(str(error).split())[:200]})") from None


def _may_change(path: Path) -> set[str]:
    """As long as no trial has a value, none was compared by it."""
    told = {"num_trials", "budget"}
    return told if read_journal(path).ended else told | {"metric", "mode", "further"}


def _refuse_changes(
    before: Study, settings: Settings, space: Space, may_change: Collection[str]
) -> None:
    old, new = _flat(before.settings, before.space), _flat(settings, space)
    found = [
        Problem(
            key, f"was {old[key]!r} when the study began", "another --study, or as it was", new[key]
        )
        for key in old
        if old[key] != new[key] and key not in may_change
    ]
    had = before.settings.num_trials
    if settings.num_trials < had:
        found.append(
            Problem("--trials", f"the study has {had}", "more, or as many", settings.num_trials)
        )
    elif settings.num_trials > had and had % settings.generation:
        rule = f"the study's {had} trials end within a generation, which has been judged as it is"
        remedy = f"another --study; {settings.generation} trials make a generation"
        found.append(Problem("--trials", rule, remedy, settings.num_trials))
    if found:
        raise ConfigError(found)


def _flat(settings: Settings, space: Space) -> Mapping[str, Any]:
    values = dataclasses.asdict(settings)
    return {**values, "space": json.dumps(space.as_dict())}
