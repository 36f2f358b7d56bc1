"""Sampling: the values of one trial, by Optuna or by its number.

Each trial is drawn by a new Optuna study and sampler, made from (seed, trial) and the trials before
it. A long-lived sampler would hold state that is lost when the driver dies; this way there is none.

CMA-ES and NSGA-II store with each trial what later ones depend on: its generation, and for CMA-ES
the whole optimizer, pickled. These notes are kept only in memory, since nothing in a directory is
ever unpickled. A new driver draws the journal's trials again, in the order of its lines. That gives
the same notes, and shows whether the libraries still draw the same values.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.requirements import require
from drivetrain.tune import by_number, decide, pareto, warm_start
from drivetrain.tune.journal import Asked, Entry, State, read_journal
from drivetrain.tune.settings import EVOLVING, Settings, Study
from drivetrain.tune.space import Choice, Int, Parameter, Scalar, Space

_MOST_TRIES = 100
_RANDOM_TRIALS = 10
"""Number of random trials of TPE, Optuna's default."""
_NEEDS = {"cmaes": "cmaes", "gp": "scipy", "qmc": "scipy"}
MIRROR = "optuna.journal"
"""A copy of the ended trials for Optuna's own tools; only appended to here."""


def ask(study: Study, state: State) -> Asked:
    """Draw the next trial."""
    trial = len(state.asked)
    is_by_number = study.settings.sampler in by_number.SAMPLERS
    values = _by_number(study, state) if is_by_number else _drawn(study, state)
    return Asked(trial, values, limits=decide.limits(study.settings, state, trial))


def _by_number(study: Study, state: State) -> dict[str, Scalar]:
    settings, known = study.settings, state.known
    if known.points is None:
        known.points = by_number.Points(study.space, settings.sampler, settings.seed)
    values: dict[str, Scalar] = known.points[len(state.asked)]
    return values


def _drawn(study: Study, state: State) -> dict[str, Scalar]:
    """Draw by Optuna; values that violate a constraint are redrawn."""
    trial = len(state.asked)
    optuna = require("optuna", extra="tune")
    earlier = _earlier(study, state, trial)
    for attempt in range(_MOST_TRIES):
        storage = _after(earlier)
        with quiet(optuna):
            made = optuna.create_study(
                storage=storage,
                sampler=_sampler(
                    optuna, study.settings, _seed(study.settings.seed, trial, attempt), earlier
                ),
                directions=_directions(study.settings),
            )
            values = suggested(study.space, made.ask())
        if study.space.allows(values):
            if study.settings.sampler in EVOLVING:
                state.known.notes[trial] = storage.notes
            return values
    rule = f"{_MOST_TRIES} draws in a row violate them, for trial {trial}"
    shown = "; ".join(study.space.constraints)
    raise ConfigError([Problem("constraints", rule, "loosen them, or narrow the ranges", shown)])


def _seed(seed: int, trial: int, attempt: int) -> int:
    """Independent seeds that are the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{trial}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _sampler(optuna: Any, settings: Settings, seed: int, earlier: list[Any]) -> Any:
    samplers = optuna.samplers
    if settings.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    if settings.sampler == "gp":
        return samplers.GPSampler(seed=seed, deterministic_objective=True)
    size = max(2, settings.generation)
    if settings.sampler == "cmaes":
        return samplers.CmaEsSampler(seed=seed, popsize=size)
    if settings.sampler == "nsgaii":
        return samplers.NSGAIISampler(seed=seed, population_size=size)
    num_random = random_trials(settings.generation)
    ended = islice((each for each in earlier if each.state.is_finished()), num_random)
    # some of the ended trials may have failed; TPE uses the others
    least = num_random // 2 if len(list(ended)) == num_random else len(earlier) + 1
    return samplers.TPESampler(seed=seed, n_startup_trials=least)


def random_trials(generation: int) -> int:
    """Number of trials that TPE draws at random: about ten, as in Optuna, in whole generations.

    With exactly ten, the second generation of eight would also be random.
    """
    whole = max(1, round(_RANDOM_TRIALS / generation)) * generation
    return min(_RANDOM_TRIALS, whole)


def require_libraries(settings: Settings) -> None:
    """Raise if a library that the sampler needs is missing, naming the extra to install."""
    require("optuna", extra="tune")
    if (module := _NEEDS.get(settings.sampler)) is not None:
        require(module, extra="tune")


def suggested(space: Space, trial: Any) -> dict[str, Scalar]:
    """Values suggested by an Optuna trial, each key after those it depends on."""
    values: dict[str, Scalar] = {}
    for key, parameter in space.parameters.items():
        if not space.is_active(key, values):
            continue
        if isinstance(parameter, Choice):
            values[key] = trial.suggest_categorical(key, parameter.values)
            continue
        low, high = parameter.low, parameter.high
        if isinstance(parameter, Int):
            values[key] = trial.suggest_int(key, low, high, step=parameter.step, log=parameter.log)
        else:
            values[key] = trial.suggest_float(
                key, low, high, step=parameter.step, log=parameter.log
            )
    return values


def _earlier(study: Study, state: State, trial: int) -> list[Any]:
    """The trials before this one, with results where the schedule allows them to be known."""
    if not study.settings.asks_by_results:
        return []
    known = decide.told(study.settings, trial)
    if study.settings.sampler in EVOLVING and len(state.known.notes) < trial:
        state.known.notes = _noted_again(study)
    if state.known.of_earlier_study is None:
        state.known.of_earlier_study = _of_earlier_study(study)
    before = state.known.of_earlier_study
    own = [_kept(study, state, each, is_known=each in known) for each in range(trial)]
    found = [*before, *own]
    for number, each in enumerate(found):
        each.number = number
    return found


def _noted_again(study: Study) -> dict[int, Mapping[str, Any]]:
    """The sampler's notes by trial: each trial is redrawn from what was known at the time."""

    def draw(state: State, entry: Entry) -> None:
        if not isinstance(entry, Asked) or entry.fork is not None:
            return
        values = _drawn(study, state)
        if values != entry.values:
            raise DrivetrainError(
                f"trial {entry.trial} was drawn with {dict(entry.values)}, but the installed "
                f"libraries would draw {values}: {study.settings.sampler} cannot continue; "
                "install the versions that the study was started with"
            )

    return read_journal(study.path, before=draw).known.notes


def _kept(study: Study, state: State, trial: int, *, is_known: bool) -> Any:
    """A trial as an Optuna trial; cached once the trial is over."""
    before = state.known.as_optuna
    if is_known and trial in before:
        return before[trial]
    made = as_optuna(study, state, trial, is_known=is_known, notes=state.known.notes.get(trial))
    if made.state.is_finished() and decide.is_over(study.settings, state, trial):
        before[trial] = made
    return made


def _after(earlier: list[Any]) -> Any:
    """A storage with these trials, plus the one to be drawn.

    Optuna's own would copy every trial on each call, which would take most of the drawing time.
    """
    in_memory: Any = require("optuna", extra="tune").storages.InMemoryStorage

    class After(in_memory):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.notes: dict[str, Any] = {}

        def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
            super().set_trial_system_attr(trial_id, key, value)
            self.notes[key] = value

        def get_trial(self, trial_id: int) -> Any:
            found = super().get_trial(trial_id)
            found.number = len(earlier)
            return found

        def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> Any:
            own = super().get_all_trials(study_id, deepcopy, states)
            for each in own:
                each.number = len(earlier)
            return [*(e for e in earlier if states is None or e.state in states), *own]

    return After()


def _of_earlier_study(study: Study) -> list[Any]:
    optuna = require("optuna", extra="tune")
    parameters = study.space.parameters
    return [
        optuna.trial.create_trial(
            value=value,
            params=values,
            distributions={key: distribution(optuna, parameters[key]) for key in values},
        )
        for values, value in warm_start.told(study)
    ]


def as_optuna(
    study: Study,
    state: State,
    trial: int,
    *,
    is_known: bool,
    notes: Mapping[str, Any] | None = None,
) -> Any:
    """A trial as an Optuna trial; one that ended at a rung is `pruned` there.

    So is one that has reached a rung with the eager schedule, where any trial may continue at any
    time: until the last trial is drawn none is over, and the sampler would learn of almost none.
    """
    optuna = require("optuna", extra="tune")
    states = optuna.trial.TrialState
    settings, last = study.settings, state.last(trial)
    values = dict(state.asked[trial].values)
    kind, found, rungs = states.RUNNING, None, {}
    is_eager = settings.schedule == "eager"
    if is_known and last is not None and (is_eager or decide.is_over(settings, state, trial)):
        rungs = _values_at_rungs(settings, state, trial)
        if last.outcome != "done":
            kind = states.FAIL
        elif last.rung < settings.num_rungs - 1:
            kind = states.PRUNED
        else:
            kind, found = states.COMPLETE, list(pareto.values_of(settings, last))
    return optuna.trial.create_trial(
        state=kind,
        values=found,
        params=values,
        distributions={key: distribution(optuna, study.space.parameters[key]) for key in values},
        intermediate_values=rungs,
        system_attrs=dict(notes or {}),
    )


def _values_at_rungs(settings: Settings, state: State, trial: int) -> dict[int, float]:
    found = [state.ended.get((trial, rung)) for rung in range(settings.num_rungs)]
    return {each.step: each.value for each in found if each is not None and each.value is not None}


def distribution(optuna: Any, parameter: Parameter) -> Any:
    """A parameter as an Optuna distribution."""
    kinds = optuna.distributions
    if isinstance(parameter, Choice):
        return kinds.CategoricalDistribution(parameter.values)
    low, high = parameter.low, parameter.high
    if isinstance(parameter, Int):
        return kinds.IntDistribution(low, high, log=parameter.log, step=parameter.step)
    return kinds.FloatDistribution(low, high, log=parameter.log, step=parameter.step)


def _directions(settings: Settings) -> list[str]:
    return ["minimize" if each.mode == "min" else "maximize" for each in settings.objectives]


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna, whose messages are about the studies made for every draw."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)


class Mirror:
    """Copies the study's ended trials to an Optuna journal, in the order of their numbers."""

    def __init__(self, study: Study) -> None:
        self._study = study
        optuna = require("optuna", extra="tune")
        journal = require("optuna.storages.journal", extra="tune")
        with quiet(optuna):
            storage = optuna.storages.JournalStorage(
                journal.JournalFileBackend(str(study.path / MIRROR))
            )
            self._optuna = optuna.create_study(
                storage=storage,
                study_name=Path(study.path).absolute().name,
                directions=_directions(study.settings),
                load_if_exists=True,
            )
        self._num_there = len(self._optuna.trials)

    def catch_up(self, state: State) -> None:
        """Add trials that are over, up to the first that is not."""
        settings = self._study.settings
        while self._num_there < len(state.asked):
            if not decide.is_over(settings, state, self._num_there):
                return
            trial = as_optuna(self._study, state, self._num_there, is_known=True)
            self._optuna.add_trial(trial)
            self._num_there += 1


def values_as_words(values: Mapping[str, Scalar]) -> list[str]:
    """Arguments for the script: path.to.key=value."""
    return [f"{key}={_word(value)}" for key, value in values.items()]


def _word(value: Scalar) -> str:
    if value is None:
        return "null"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )
