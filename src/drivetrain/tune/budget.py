"""Budget: how much a study may take, and whether one more run can be begun. Pure.

What a run has taken is in the journal, with its result, in the budget's own unit. What the next
one will take is not known: it is expected to take what the dearest at the same rung has taken, and
nothing before one has come there. What runs is counted with that, so that a budget is exceeded by
no more than runs that were dearer than all before them. Whatever has begun is trained to its rung.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import State

_UNITS = {"h": "device-hours", "usd": "USD", "flops": "FLOPs"}


@dataclass(frozen=True)
class Budget:
    """So much of something."""

    amount: float
    unit: str
    """h, usd or flops."""

    def shown(self, amount: float) -> str:
        return f"{amount:.4g} of {self.amount:.4g} {_UNITS[self.unit]}"


def parse(text: str) -> Budget:
    """12h (device-hours), 200USD or 1e18flops."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*(h|usd|flops)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        rule, remedy = "not a budget", "12h (device-hours), 200USD or 1e18flops"
        raise ConfigError([Problem("--budget", rule, remedy, text)])
    return Budget(float(found[1]), found[2])


def spent(state: State) -> float:
    """By all trials, as far as they have come to a rung or an end."""
    last = (state.last(trial) for trial in range(len(state.asked)))
    return sum(each.spent or 0.0 for each in last if each is not None)


def expected(state: State, rung: int) -> float:
    """What a run to a rung from the one before took at most so far; 0 while nobody knows."""
    found = [0.0]
    for (trial, at), end in state.ended.items():
        if at == rung and end.outcome == "done" and end.spent is not None:
            before = state.ended.get((trial, rung - 1))
            found.append(end.spent - (before.spent or 0.0 if before is not None else 0.0))
    return max(found)


def affords(budget: Budget, state: State, running: Iterable[Work], rung: int) -> bool:
    """Whether one more run to a rung can begin beside those that run."""
    taken = spent(state)
    committed = taken + sum(expected(state, work.rung) for work in running)
    if expected(state, rung) == 0.0:
        return committed < budget.amount
    return committed + expected(state, rung) <= budget.amount
