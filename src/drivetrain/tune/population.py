"""A population: members train to a rung; there the worst are replaced by forks of the best. Pure.

Member *m* is a place, held by trial *m* at first. A rung is judged once all members have reached
it. The worst of them, and all that have failed, end there, and each place goes to a new trial: a
fork of one of the best, from its checkpoint at that rung, with values near its own, or those that
`pb2` finds. A fork's donor is a hash of (seed, rung, member), and forks are numbered in the order
of their places. So nothing depends on which member was first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain.tune.journal import Ended, State
from drivetrain.tune.perturb import chosen, perturbed
from drivetrain.tune.settings import Settings, Study
from drivetrain.tune.space import Scalar


@dataclass(frozen=True)
class Due:
    """A fork to make."""

    trial: int
    """Number of the new trial."""
    member: int
    donor: int
    rung: int
    """The rung it forks from; it trains to the next one."""
    step: int
    values: Mapping[str, Scalar]


def ready(settings: Settings, state: State) -> list[tuple[int, int]]:
    """Trials that can train now, each with the rung it trains to.

    Nothing continues from a rung before all forks from it are in the journal: until then their
    donors must wait, to keep their checkpoints.
    """
    *_, (rung, holders) = _rungs(settings, state)
    return [(trial, rung) for trial in sorted(holders) if (trial, rung) not in state.ended]


def is_left(settings: Settings, state: State, trial: int, rung: int) -> bool:
    """Whether a trial that has reached a rung ends there."""
    place = _place(state, trial)
    if (rung, place) in _forks(state):
        return True
    *_, (last, holders) = _rungs(settings, state)
    if last > rung:
        return False
    replaced = _replaced(settings, state, holders, rung)
    # if no member has a value there is none to fork from, and the population ends
    return replaced is not None and (place in replaced or len(replaced) == len(holders))


def next_fork(study: Study, state: State) -> Due | None:
    """The next fork to make; None if none is due."""
    settings, forks = study.settings, _forks(state)
    *_, (rung, holders) = _rungs(settings, state)
    if rung == settings.num_rungs - 1:
        return None
    for place in _replaced(settings, state, holders, rung) or ():
        if (rung, place) not in forks:
            return _fork(study, state, holders, rung, place)
    return None


def _rungs(settings: Settings, state: State) -> Iterator[tuple[int, list[int]]]:
    """Each rung that is settled so far, with the trials that train to it, by place."""
    holders = list(range(min(settings.population, len(state.asked))))
    forks = _forks(state)
    for rung in range(settings.num_rungs):
        yield rung, list(holders)
        replaced = _replaced(settings, state, holders, rung)
        if replaced is None or any((rung, place) not in forks for place in replaced):
            return
        for place in replaced:
            holders[place] = forks[rung, place]


def _fork(study: Study, state: State, holders: list[int], rung: int, place: int) -> Due | None:
    settings = study.settings
    donors = _donors(settings, state, holders, rung)
    if not donors:
        return None  # all have failed
    draw = f"{settings.seed}/fork/{rung}/{place}"
    donor = donors[chosen(len(donors), draw)]
    values = perturbed(
        study.space, state.asked[donor].values, settings.perturbing, f"{draw}/values"
    )
    if settings.explore == "pb2":
        from drivetrain.tune.pb2 import explored  # numpy, which nothing else here needs

        going_on = _going_on(settings, state, holders, rung)
        values = explored(study, state, rung, going_on, donor, values, draw)
    step = settings.rungs[rung]
    return Due(len(state.asked), place, donor, rung, step, values)


def _going_on(settings: Settings, state: State, holders: list[int], rung: int) -> list[int]:
    """Trials that train to the next rung, by place, as far as forks are made."""
    replaced, forks = _replaced(settings, state, holders, rung) or [], _forks(state)
    found = [
        forks.get((rung, place)) if place in replaced else trial
        for place, trial in enumerate(holders)
    ]
    return [trial for trial in found if trial is not None]


def _place(state: State, trial: int) -> int:
    fork = state.asked[trial].fork
    return trial if fork is None else fork.member


def _forks(state: State) -> dict[tuple[int, int], int]:
    """(rung, place) → the trial that was forked there."""
    return {
        (asked.fork.rung, asked.fork.member): asked.trial
        for asked in state.asked
        if asked.fork is not None
    }


def _ranked(settings: Settings, state: State, holders: list[int], rung: int) -> list[Ended] | None:
    """Results at a rung, best first and failed last; None before all have reached it."""
    found = [state.ended.get((trial, rung)) for trial in holders]
    results = [each for each in found if each is not None]
    if len(results) < settings.population:
        return None
    sign = 1.0 if settings.mode == "min" else -1.0

    def order(each: Ended) -> tuple[bool, float, int]:
        return each.value is None, sign * (each.value or 0.0), each.trial

    return sorted(results, key=order)


def _replaced(settings: Settings, state: State, holders: list[int], rung: int) -> list[int] | None:
    """Places whose trials end at a rung; None before all have reached it."""
    ranked = _ranked(settings, state, holders, rung)
    if ranked is None:
        return None
    worst = {each.trial for each in ranked[-settings.num_replaced :]}
    worst |= {each.trial for each in ranked if each.value is None}
    return [place for place, trial in enumerate(holders) if trial in worst]


def _donors(settings: Settings, state: State, holders: list[int], rung: int) -> list[int]:
    ranked = _ranked(settings, state, holders, rung) or []
    return [each.trial for each in ranked[: settings.num_replaced] if each.value is not None]
