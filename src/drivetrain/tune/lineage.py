"""The lineage of a population as a plain-text tree: the forks of each trial, and their steps."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.tune import decide
from drivetrain.tune.journal import Asked, State
from drivetrain.tune.settings import Study
from drivetrain.tune.space import short_key, short_value


def tree(study: Study, state: State) -> list[str]:
    """One line per trial, forks under their donors."""
    best = decide.winner(study.settings, state)
    number = None if best is None else best.trial
    roots = [asked for asked in state.asked if asked.fork is None]
    return [text for root in roots for text in _lines(study, state, root, number, "", "")]


def _lines(
    study: Study, state: State, asked: Asked, best: int | None, first: str, rest: str
) -> Iterator[str]:
    forks = [
        each for each in state.asked if each.fork is not None and each.fork.donor == asked.trial
    ]
    mark = "  *" if asked.trial == best else ""
    yield f"{first}{asked.trial}  {_begin(state, asked)}{_values(study, state, asked)}{mark}"
    for number, fork in enumerate(forks):
        is_last = number == len(forks) - 1
        head, tail = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield from _lines(study, state, fork, best, rest + head, rest + tail)


def _begin(state: State, asked: Asked) -> str:
    if asked.fork is None:
        return " ".join(
            f"{short_key(key)}={short_value(value)}" for key, value in asked.values.items()
        )
    before = state.asked[asked.fork.donor].values
    changes = [
        f"{short_key(key)} {short_value(before.get(key))} → {short_value(value)}"
        for key, value in asked.values.items()
        if before.get(key) != value
    ]
    return f"from step {asked.fork.step}: {', '.join(changes) or 'no change'}"


def _values(study: Study, state: State, asked: Asked) -> str:
    """Its metric at each rung it has reached."""
    found = [state.ended.get((asked.trial, rung)) for rung in range(study.settings.num_rungs)]
    shown = [
        f"{each.step}: {each.value:.4g}" if each.value is not None else each.outcome
        for each in found
        if each is not None
    ]
    return f"  ({', '.join(shown)})".replace("_", " ") if shown else ""
