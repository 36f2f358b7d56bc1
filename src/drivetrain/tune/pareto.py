"""Several objectives: the results that no other dominates. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drivetrain.tune.journal import Ended, State
from drivetrain.tune.settings import Settings, Study


def front(settings: Settings, results: Iterable[Ended]) -> list[Ended]:
    """The results that none dominates, by first objective, then by trial; equal ones all count."""
    done = [each for each in results if each.outcome == "done"]
    found: list[tuple[tuple[float, ...], Ended]] = []
    # a dominating result comes first in this order, so each is compared with the front only
    for place, _, end in sorted((_place(settings, each), each.trial, each) for each in done):
        if not any(_dominates(other, place) for other, _ in found):
            found.append((place, end))
    return [end for _, end in found]


def values_of(settings: Settings, end: Ended) -> tuple[float, ...]:
    """One value per objective; empty if the trial has none."""
    if end.value is None:
        return ()
    return end.objectives if settings.further else (end.value,)


def views(study: Study, state: State) -> list[tuple[Study, State]]:
    """The study as one study per objective, for charts of a single objective."""
    settings = study.settings
    if not settings.further:
        return [(study, state)]
    found = []
    for index, each in enumerate(settings.objectives):
        alone = replace(settings, metric=each.metric, mode=each.mode, further=())
        seen = State()
        for asked in state.asked:
            seen.take(asked)
        for end in state.ended.values():
            value = end.objectives[index] if end.objectives else None
            seen.take(replace(end, value=value, objectives=()))
        found.append((replace(study, settings=alone), seen))
    return found


def _place(settings: Settings, end: Ended) -> tuple[float, ...]:
    """The values with signs such that smaller is better."""
    pairs = zip(settings.objectives, values_of(settings, end), strict=True)
    return tuple(value if each.mode == "min" else -value for each, value in pairs)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
