"""PB2: a fork's numbers from a Gaussian process instead of at random. Pure: its draws are hashes.

Population Based Bandits (Parker-Holder et al., 2020). What a member gains from one rung to the next
is a function of its values that changes with time. A fork gets the values whose gain has the
highest upper confidence bound in the coming interval. Members that already continue to the next
rung count as observed there, so that forks of one rung differ: the variance of a Gaussian process
does not depend on the observed values.

Gains enter by their rank within the interval (as normal scores). Early gains are larger than late
ones by orders of magnitude, one member that diverges would make all others look the same, and the
loss before the first step, which is not evaluated, is the same for all. The points also contain how
good the member was when the interval began, since the worst have most to gain.

The result is one of a set of candidates, not where an optimizer stopped, so rounding can only
decide between two that are equally good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from drivetrain.tune import gaussian_process
from drivetrain.tune.gaussian_process import Array
from drivetrain.tune.journal import Ended, State
from drivetrain.tune.perturb import at_place, chances, place_of
from drivetrain.tune.settings import Settings, Study
from drivetrain.tune.space import Scalar, Space

_MOST = 256
"""Newest results that the model is fitted to; the cost grows with the third power of this."""
_NUM_CANDIDATES = 512
_WIDTHS = (1.0, 0.25, 0.0625)
"""Candidates are drawn from the whole space, then closer and closer to the best so far."""


def explored(
    study: Study,
    state: State,
    rung: int,
    going_on: Sequence[int],
    donor: int,
    perturbed: Mapping[str, Scalar],
    draw: str,
) -> dict[str, Scalar]:
    """The values of a fork from `rung`: the perturbed ones, with numbers chosen by the model.

    `going_on` are the trials that train to the next rung, as far as they are known.
    """
    points, gains = observed(study, state, rung)
    pending = [
        [rung + 1, _standing(study.settings, state, trial, rung + 1), *_places(study, state, trial)]
        for trial in going_on
    ]
    looked_at = np.array([*points.tolist(), *pending])
    kernel = gaussian_process.fitted(points, gains)
    # the constants of the authors' code, times the deviation as in GP-UCB (their code: the
    # variance); the 1 keeps it above 0 for a single result
    width = math.sqrt(0.2 * math.log(1 + 0.4 * len(gains)))
    begins = [rung + 1, _share(study.settings, state, state.ended[donor, rung])]

    def bound(places: Array) -> Array:
        at = np.hstack([np.tile(begins, (len(places), 1)), places])
        expected = gaussian_process.mean(kernel, points, gains, at)
        return expected + width * gaussian_process.deviation(kernel, looked_at, at)

    return best_of(study.space, perturbed, bound, draw, _same_line(state, rung, going_on, donor))


def _same_line(
    state: State, rung: int, going_on: Sequence[int], donor: int
) -> list[Mapping[str, Scalar]]:
    """Values that already continue from the donor; another fork with them would be the same run."""
    asked = [state.asked[trial] for trial in going_on]
    return [
        each.values
        for each in asked
        if each.trial == donor or (each.fork and (each.fork.donor, each.fork.rung) == (donor, rung))
    ]


def observed(study: Study, state: State, last: int) -> tuple[Array, Array]:
    """Points and gains of all intervals up to a rung, in the order of (rung, trial).

    A NaN or infinite loss is the lowest gain. Trials that failed otherwise, or were too large to
    start, give no information about their values, and are left out.
    """
    points, gains = [], []
    for rung in range(last + 1):
        here = [
            each
            for (_, at), each in sorted(state.ended.items())
            if at == rung and each.outcome in ("done", "not_finite")
        ]
        found = [_gain(study.settings, state, each) for each in here]
        for each, gain in zip(here, found, strict=True):
            standing = _standing(study.settings, state, each.trial, rung)
            points.append([rung, standing, *_places(study, state, each.trial)])
            gains.append(NormalDist().inv_cdf(_rank(gain, found)))
    return np.array(points[-_MOST:], dtype=float), np.array(gains[-_MOST:])


def best_of(
    space: Space,
    values: Mapping[str, Scalar],
    bound: Callable[[Array], Array],
    draw: str,
    taken: Sequence[Mapping[str, Scalar]] = (),
) -> dict[str, Scalar]:
    """The candidate with the highest bound; `values` unchanged if none is allowed."""
    ranges = space.numbers
    best, middle, highest = dict(values), [0.5] * len(ranges), -math.inf
    chance = chances(f"{draw}/pb2")
    for width in _WIDTHS:
        found = []
        for _ in range(_NUM_CANDIDATES):
            near = [min(max(each + width * (next(chance) - 0.5), 0.0), 1.0) for each in middle]
            numbers = {
                key: at_place(each, place)
                for (key, each), place in zip(ranges.items(), near, strict=True)
            }
            candidate = {**values, **numbers}
            if space.allows(candidate) and candidate not in taken:
                found.append(candidate)
        if not found:
            continue
        places = [[place_of(each, one[key]) for key, each in ranges.items()] for one in found]
        bounds = bound(np.array(places))
        first = int(np.argmax(bounds))
        if bounds[first] > highest:
            best, middle, highest = found[first], places[first], float(bounds[first])
    return best


def _places(study: Study, state: State, trial: int) -> list[float]:
    values = state.asked[trial].values
    return [place_of(each, values.get(key)) for key, each in study.space.numbers.items()]


def _before(state: State, trial: int, rung: int) -> Ended | None:
    """The result a trial began an interval with: its own or its donor's; None at the start."""
    fork = state.asked[trial].fork
    whose = fork.donor if fork is not None and fork.rung == rung - 1 else trial
    return state.ended.get((whose, rung - 1))


def _gain(settings: Settings, state: State, end: Ended) -> float:
    if end.value is None:
        return -math.inf
    before = _before(state, end.trial, end.rung)
    began = 0.0 if before is None or before.value is None else before.value
    return began - end.value if settings.mode == "min" else end.value - began


def _standing(settings: Settings, state: State, trial: int, rung: int) -> float:
    before = _before(state, trial, rung)
    return 0.5 if before is None else _share(settings, state, before)


def _share(settings: Settings, state: State, end: Ended) -> float:
    """Rank of a result among those at its rung: near 0 the worst, near 1 the best."""
    sign = -1.0 if settings.mode == "min" else 1.0
    values = [
        sign * each.value
        for (_, rung), each in state.ended.items()
        if rung == end.rung and each.value is not None
    ]
    return 0.5 if end.value is None else _rank(sign * end.value, values)


def _rank(value: float, among: Sequence[float]) -> float:
    """Fraction of `among` that is below `value`; ties count half."""
    below, equal = sum(each < value for each in among), sum(each == value for each in among)
    return (below + equal / 2) / len(among)
