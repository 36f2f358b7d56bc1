"""Decisions: which runs come next, who goes on, who has won. Pure: settings and results in.

(`State.known` keeps what was found out, so that it is found out once.)

Deterministic: trials compete within their generation. At a rung the best of it go on, once all of
them have come there; equal values go by the trial's number, and a trial that has failed is behind
all others. So nothing depends on who was first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    return trial if _num_over(settings, state) >= first else None


def _num_over(settings: Settings, state: State) -> int:
    """So many of the first trials are over, and the next is not."""
    known = state.known
    while known.num_over < len(state.asked) and is_over(settings, state, known.num_over):
        known.num_over += 1
    return known.num_over


def told(settings: Settings, trial: int) -> range:
    """The trials whose results a trial is asked with."""
    if settings.schedule == "eager":
        return range(trial)
    return range(trial - trial % settings.generation)


def ready(settings: Settings, state: State) -> list[Work]:
    """What can be trained now, in the order in which it should be: what began first, first."""
    if state.known.ready is None:
        state.known.ready = _ready(settings, state)
    return list(state.known.ready)


def _ready(settings: Settings, state: State) -> list[Work]:
    if settings.population:
        return [Work(*each) for each in population.ready(settings, state)]
    found = []
    # eagerly a trial may go on until the last is asked for: none of them is over before
    first = 0 if settings.schedule == "eager" else _num_over(settings, state)
    for trial in range(first, len(state.asked)):
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
    if (trial, rung) in state.known.judged:
        return state.known.judged[trial, rung]
    here = _at_rung(settings, state, trial, rung)
    if here is None:
        return None
    # of a generation that the number of trials has cut short at least one goes on
    most = max(1, len(settings.generation_of(trial)) // settings.factor ** (rung + 1))
    who = {each.trial for each in best_first(settings, here)[:most]}
    state.known.judged.update(((each.trial, rung), who) for each in here)
    return who


def _at_rung(settings: Settings, state: State, trial: int, rung: int) -> list[Ended] | None:
    """The results of those in the generation that were to come to a rung; None before all have."""
    members: Sequence[int] = settings.generation_of(trial)
    if rung > 0:
        before = promoted(settings, state, trial, rung - 1)
        if before is None:
            return None
        members = sorted(before)
    # the last of them is mostly the last to come: whoever asks too early knows at once
    if any((member, rung) not in state.ended for member in reversed(members)):
        return None
    return [state.ended[member, rung] for member in members]


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
