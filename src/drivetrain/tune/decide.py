"""Decisions: which runs come next, who goes on, who has won. Pure: settings and results in.

Deterministic: trials compete within their generation. At a rung the best of it go on, once all of
them have come there; equal values go by the trial's number, and a trial that has failed is behind
all others. So nothing depends on who was first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain.tune import population
from drivetrain.tune.journal import Ended, State
from drivetrain.tune.settings import Settings


@dataclass(frozen=True, order=True)
class Work:
    """A trial is to be trained up to a rung."""

    trial: int
    rung: int


def is_over(settings: Settings, state: State, trial: int) -> bool:
    """Whether nothing more will come of a trial."""
    last = state.last(trial)
    if last is None:
        return False
    if last.outcome != "done" or last.rung == settings.num_rungs - 1:
        return True
    if settings.population:
        return population.is_left(settings, state, trial, last.rung)
    if settings.schedule == "eager":
        return _all_asked_and_still(settings, state)
    who = promoted(settings, state, trial, last.rung)
    return who is not None and trial not in who


def next_trial(settings: Settings, state: State) -> int | None:
    """The trial that may be asked for now; None when none may."""
    trial = len(state.asked)
    if trial >= settings.num_trials:
        return None
    if settings.schedule == "eager" or not settings.asks_by_results:
        return trial
    first = trial - trial % settings.generation
    known = all(is_over(settings, state, each) for each in range(first))
    return trial if known else None


def told(settings: Settings, trial: int) -> range:
    """The trials whose results a trial is asked with."""
    if settings.schedule == "eager":
        return range(trial)
    return range(trial - trial % settings.generation)


def ready(settings: Settings, state: State) -> list[Work]:
    """What can be trained now, in the order in which it should be: what began first, first."""
    if settings.population:
        return [Work(*each) for each in population.ready(settings, state)]
    found = []
    for trial in range(len(state.asked)):
        last = state.last(trial)
        if last is None:
            found.append(Work(trial, 0))
        elif last.outcome == "done" and _goes_on(settings, state, trial, last.rung):
            found.append(Work(trial, last.rung + 1))
    return found


def _goes_on(settings: Settings, state: State, trial: int, rung: int) -> bool:
    if rung == settings.num_rungs - 1:
        return False
    if settings.schedule == "eager":
        return (trial, rung + 1) in state.promoted
    return trial in (promoted(settings, state, trial, rung) or ())


def promoted(settings: Settings, state: State, trial: int, rung: int) -> set[int] | None:
    """Who of a trial's generation goes on from a rung; None before all have come to it."""
    here = _at_rung(settings, state, trial, rung)
    if here is None:
        return None
    # of a generation that the number of trials has cut short at least one goes on
    most = max(1, len(settings.generation_of(trial)) // settings.factor ** (rung + 1))
    return {each.trial for each in best_first(settings, here)[:most]}


def _at_rung(settings: Settings, state: State, trial: int, rung: int) -> list[Ended] | None:
    """The results of those in the generation that were to come to a rung; None before all have."""
    members: Iterable[int] = settings.generation_of(trial)
    if rung > 0:
        before = promoted(settings, state, trial, rung - 1)
        if before is None:
            return None
        members = sorted(before)
    found = [state.ended.get((member, rung)) for member in members]
    return None if None in found else [each for each in found if each is not None]


def newly_promoted(settings: Settings, state: State) -> list[Work]:
    """Eager: who goes on by what is known now (ASHA): the best of those at each rung so far."""
    found = []
    for rung in range(settings.num_rungs - 1):
        here = [each for (_, at), each in state.ended.items() if at == rung]
        most = len(here) // settings.factor
        for each in best_first(settings, here)[:most]:
            if (each.trial, rung + 1) not in state.promoted:
                found.append(Work(each.trial, rung + 1))
    return found


def _all_asked_and_still(settings: Settings, state: State) -> bool:
    return len(state.asked) == settings.num_trials and not ready(settings, state)


def best_first(settings: Settings, results: Iterable[Ended]) -> list[Ended]:
    """Those that have a value, the best in front."""
    sign = 1.0 if settings.mode == "min" else -1.0
    done = [each for each in results if each.outcome == "done" and each.value is not None]
    return sorted(done, key=lambda each: (sign * (each.value or 0.0), each.trial))


def winner(settings: Settings, state: State) -> Ended | None:
    """The best of those that have come furthest."""
    results = [each for each in state.ended.values() if each.outcome == "done"]
    furthest = max((each.rung for each in results), default=0)
    found = best_first(settings, [each for each in results if each.rung == furthest])
    return found[0] if found else None
