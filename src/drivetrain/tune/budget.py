"""Budget: how much a study may spend, and whether one more run can start. Pure.

The journal has what each run spent, with its result, in the budget's unit. The next run is expected
to spend as much as the most expensive run to the same rung so far, and nothing before one has
reached that rung. Running trials are counted with that expectation, so a budget is exceeded only by
runs that were more expensive than all before them. A run that has started is trained to its rung.
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
    """An amount of one unit."""

    amount: float
    unit: str
    """h, usd or flops."""

    def shown(self, amount: float) -> str:
        return f"{amount:.4g} of {self.amount:.4g} {_UNITS[self.unit]}"


def parse(text: str) -> Budget:
    """Parse 12h (device-hours), 200USD or 1e18flops."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)\s*(h|usd|flops)", text.strip().lower())
    if found is None or float(found[1]) <= 0:
        rule, remedy = "not a budget", "use 12h (device-hours), 200USD or 1e18flops"
        raise ConfigError([Problem("--budget", rule, remedy, text)])
    return Budget(float(found[1]), found[2])


def spent(state: State) -> float:
    """Total of all trials, up to the last rung or end that each has reached."""
    last = (state.last(trial) for trial in range(len(state.asked)))
    return sum(each.spent or 0.0 for each in last if each is not None)


def expected(state: State, rung: int) -> float:
    """The most that a run to a rung from the previous one has spent so far; 0 if none has."""
    found = [0.0]
    for (trial, at), end in state.ended.items():
        if at == rung and end.outcome == "done" and end.spent is not None:
            before = state.ended.get((trial, rung - 1))
            found.append(end.spent - (before.spent or 0.0 if before is not None else 0.0))
    return max(found)


def affords(budget: Budget, state: State, running: Iterable[Work], rung: int) -> bool:
    """Whether one more run to a rung can start in addition to the running ones."""
    taken = spent(state)
    committed = taken + sum(expected(state, work.rung) for work in running)
    if expected(state, rung) == 0.0:
        return committed < budget.amount
    return committed + expected(state, rung) <= budget.amount
