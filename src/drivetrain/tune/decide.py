"""Decisions: which runs come next, which continue, which is best. Pure: settings and results in.

(`State.known` caches results, so that they are computed once.)

Deterministic: trials compete within their generation. At a rung the best continue once all of the
generation have reached it; ties are broken by the trial's number, and a failed trial ranks behind
all others. So nothing depends on which trial was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain.tune import pareto, population, stopping
from drivetrain.tune.journal import Ended, State
from drivetrain.tune.settings import Settings
from drivetrain.tune.stopping import best_first


@dataclass(frozen=True, order=True)
class Work:
    """A trial to train up to a rung."""

    trial: int
    rung: int


def is_over(settings: Settings, state: State, trial: int) -> bool:
    """Whether a trial will not be trained any further."""
    last = state.last(trial)
    if last is None:
        return False
    if last.outcome != "done" or last.rung == settings.num_rungs - 1:
        return True
    if settings.population:
        return population.is_left(settings, state, trial, last.rung)
    if settings.promote == "stop":
        return not _goes_on(settings, state, trial, last.rung)
    if settings.schedule == "eager":
        return _all_asked_and_still(settings, state)
    who = promoted(settings, state, trial, last.rung)
    return who is not None and trial not in who


def next_trial(settings: Settings, state: State) -> int | None:
    """The trial whose values may be drawn now; None if none may."""
    trial = len(state.asked)
    if trial >= settings.num_trials:
        return None
    if settings.schedule == "eager" or not settings.waits_for_results:
        return trial
    first = trial - trial % settings.generation
    return trial if _num_over(settings, state) >= first else None


def _num_over(settings: Settings, state: State) -> int:
    """Number of first trials that are over without a gap."""
    known = state.known
    while known.num_over < len(state.asked) and is_over(settings, state, known.num_over):
        known.num_over += 1
    return known.num_over


def told(settings: Settings, trial: int) -> range:
    """The trials whose results are known when a trial's values are drawn."""
    if settings.schedule == "eager":
        return range(trial)
    return range(trial - trial % settings.generation)


def limits(settings: Settings, state: State, trial: int) -> tuple[float | None, ...]:
    """With --promote stop: the value that a trial must not be worse than at each rung."""
    if settings.promote != "stop":
        return ()
    first = stopping.first_rung(settings, trial)
    rivals = [
        each for each in told(settings, trial) if stopping.first_rung(settings, each) == first
    ]
    found = []
    for rung in range(len(settings.rungs)):
        here = [state.ended[each, rung] for each in rivals if (each, rung) in state.ended]
        found.append(stopping.limit(settings, here))
    return tuple(found)


def ready(settings: Settings, state: State) -> list[Work]:
    """The work that can be trained now, in the order to start it: oldest trials first."""
    if state.known.ready is None:
        state.known.ready = _ready(settings, state)
    return list(state.known.ready)


def _ready(settings: Settings, state: State) -> list[Work]:
    if settings.population:
        return [Work(*each) for each in population.ready(settings, state)]
    found = []
    # eager: a trial may continue until the last one is drawn, so none is over before
    first = 0 if settings.schedule == "eager" else _num_over(settings, state)
    for trial in range(first, len(state.asked)):
        last = state.last(trial)
        if last is None:
            found.append(Work(trial, stopping.first_rung(settings, trial)))
        elif last.outcome == "done" and _goes_on(settings, state, trial, last.rung):
            found.append(Work(trial, last.rung + 1))
    return found


def _goes_on(settings: Settings, state: State, trial: int, rung: int) -> bool:
    if rung == settings.num_rungs - 1:
        return False
    if settings.promote == "stop":
        limit = state.asked[trial].limits[rung]
        return stopping.is_within(settings, state.ended[trial, rung].value, limit)
    if settings.schedule == "eager":
        return (trial, rung + 1) in state.promoted
    return trial in (promoted(settings, state, trial, rung) or ())


def promoted(settings: Settings, state: State, trial: int, rung: int) -> set[int] | None:
    """The trials of a generation that continue from a rung; None before all have reached it."""
    if (trial, rung) in state.known.judged:
        return state.known.judged[trial, rung]
    here = _at_rung(settings, state, trial, rung)
    if here is None:
        return None
    num_rivals = len(stopping.rivals(settings, trial))
    depth = rung - stopping.first_rung(settings, trial) + 1
    who = stopping.who_goes_on(settings, here, num_rivals // settings.factor**depth)
    state.known.judged.update(((each.trial, rung), who) for each in here)
    return who


def _at_rung(settings: Settings, state: State, trial: int, rung: int) -> list[Ended] | None:
    """Results of the trials that were due at a rung; None before all have reached it."""
    members: Sequence[int] = stopping.rivals(settings, trial)
    if rung > stopping.first_rung(settings, trial):
        before = promoted(settings, state, trial, rung - 1)
        if before is None:
            return None
        members = sorted(before)
    # the last member is usually the last to arrive, so an early call returns quickly
    if any((member, rung) not in state.ended for member in reversed(members)):
        return None
    return [state.ended[member, rung] for member in members]


def newly_promoted(settings: Settings, state: State) -> list[Work]:
    """Eager (ASHA): the trials that continue by the results so far, the best at each rung."""
    found = []
    if settings.promote == "stop":
        return []
    for rung in range(settings.num_rungs - 1):
        brackets: dict[int, list[Ended]] = {}
        for (trial, at), each in state.ended.items():
            if at == rung:
                brackets.setdefault(stopping.first_rung(settings, trial), []).append(each)
        for here in brackets.values():
            if (most := len(here) // settings.factor) or settings.stopping == "median":
                who = sorted(stopping.who_goes_on(settings, here, most))
                found += [Work(trial, rung + 1) for trial in who]
    return [work for work in found if (work.trial, work.rung) not in state.promoted]


def _all_asked_and_still(settings: Settings, state: State) -> bool:
    return len(state.asked) == settings.num_trials and not ready(settings, state)


def winner(settings: Settings, state: State) -> Ended | None:
    """The best of the trials that trained furthest; None for several objectives."""
    found = best(settings, state)
    return found[0] if found and not settings.further else None


def best(settings: Settings, state: State) -> list[Ended]:
    """The winner alone, or the trials of the Pareto front."""
    results = [each for each in state.ended.values() if each.outcome == "done"]
    if settings.further:
        return pareto.front(settings, results)
    furthest = max((each.rung for each in results), default=0)
    return best_first(settings, [each for each in results if each.rung == furthest])[:1]
