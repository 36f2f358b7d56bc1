"""Several objectives: the results that no other is better than in all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drivetrain.tune.journal import Ended, State
from drivetrain.tune.settings import Settings, Study


def front(settings: Settings, results: Iterable[Ended]) -> list[Ended]:
    """Those that none dominates, by the first objective and then by number; equals are all in."""
    done = [each for each in results if each.outcome == "done"]
    found: list[tuple[tuple[float, ...], Ended]] = []
    # whoever dominates comes first in this order, so each is held against the front alone
    for place, _, end in sorted((_place(settings, each), each.trial, each) for each in done):
        if not any(_dominates(other, place) for other, _ in found):
            found.append((place, end))
    return [end for _, end in found]


def values_of(settings: Settings, end: Ended) -> tuple[float, ...]:
    """By objective; empty where it came to no value."""
    if end.value is None:
        return ()
    return end.objectives if settings.further else (end.value,)


def views(study: Study, state: State) -> list[tuple[Study, State]]:
    """The same study by each of its objectives alone, for charts of one."""
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
    """Smaller is better, in each."""
    pairs = zip(settings.objectives, values_of(settings, end), strict=True)
    return tuple(value if each.mode == "min" else -value for each, value in pairs)


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
