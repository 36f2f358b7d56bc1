"""Stopping rules: which trials continue at a rung. Pure: settings and results in.

Each rule has two forms. Pause: all rivals are at the rung, and `who_goes_on` decides which of them
continue. Stop: `limit` decides in advance, from earlier trials, what a trial must not be worse
than; its run applies that limit by itself, and ends or continues at once.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence

from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.settings import Settings


def best_first(settings: Settings, results: Iterable[Ended]) -> list[Ended]:
    """The results that have a value, best first."""
    sign = _sign(settings)
    done = [each for each in results if each.outcome == "done" and each.value is not None]
    return sorted(done, key=lambda each: (sign * (each.value or 0.0), each.trial))


def who_goes_on(settings: Settings, here: Sequence[Ended], share: int) -> set[int]:
    """The trials at a rung that continue: the best `share` (at least one), or the better half."""
    found = best_first(settings, here)
    if settings.stopping != "median":
        return {each.trial for each in found[: max(1, share)]}
    half = limit(settings, here)
    return {each.trial for each in found if is_within(settings, each.value, half)}


def limit(settings: Settings, earlier: Iterable[Ended]) -> float | None:
    """What the next trial at a rung must not be worse than; None without earlier results."""
    values = [each.value for each in best_first(settings, earlier) if each.value is not None]
    if not values:
        return None
    if settings.stopping == "median":
        return statistics.median(values)
    best = max(1, (len(values) + 1) // settings.factor)  # with the next one counted in
    return values[best - 1]


def is_within(settings: Settings, value: float | None, limit: float | None) -> bool:
    """Whether a value is not worse than a limit."""
    sign = _sign(settings)
    return value is not None and (limit is None or sign * value <= sign * limit)


def rivals(settings: Settings, trial: int) -> list[int]:
    """The trials of its generation that start at the same rung, itself included."""
    generation = settings.generation_of(trial)
    first = first_rung(settings, trial)
    return [each for each in generation if first_rung(settings, each) == first]


def first_rung(settings: Settings, trial: int) -> int:
    """The first rung at which a trial is judged: 0, or its bracket with Hyperband.

    Bracket b skips b rungs, the last bracket all of them. Each trains about the same number of
    steps in all, so a bracket that starts with short trials has more of them.
    """
    if settings.stopping != "hyperband":
        return 0
    place = (trial % settings.generation + 0.5) / settings.generation
    shares = _shares(settings)
    passed = 0.0
    for bracket, share in enumerate(shares[:-1]):
        passed += share / sum(shares)
        if place < passed:
            return bracket
    return len(shares) - 1


def _shares(settings: Settings) -> list[int]:
    """Trials of each bracket (Li et al. 2018): ceil(B * factor^s / (s + 1)), s rungs to go."""
    brackets = settings.num_rungs
    return [
        -(-brackets * settings.factor**rungs_to_go // (rungs_to_go + 1))
        for rungs_to_go in reversed(range(brackets))
    ]


def config_words(settings: Settings, asked: Asked, rung: int) -> list[str]:
    """Config overrides for the run of a trial up to a rung: path.to.key=value."""
    found = []
    limits = [
        (step, limit)
        for step, limit in zip(settings.rungs, asked.limits, strict=False)
        if limit is not None
    ]
    if limits:
        found.append(f"early_stopping.limits={json.dumps(limits)}")
    if settings.patience is not None:
        found.append(f"early_stopping.patience={settings.patience}")
    if found:
        found.append(f"early_stopping.metric={settings.metric}")
        found.append(f"early_stopping.mode={settings.mode}")
    if settings.promote == "pause" and rung < len(settings.rungs):
        found.append(f"stop_at_step={settings.rungs[rung]}")
    return found


def _sign(settings: Settings) -> float:
    return 1.0 if settings.mode == "min" else -1.0
