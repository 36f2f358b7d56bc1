"""What came of the simulated runs: goodput and money, with their intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drivetrain.plan.simulation.closed_form import expected_goodput
from drivetrain.plan.simulation.engine import Runs, simulate
from drivetrain.plan.simulation.inputs import DAY_S, HOUR_S, Inputs


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, and where 95% of single runs lie."""

    mean: float
    low: float
    high: float
    error: float = 0.0
    """Half the 95% interval of the mean itself: how far more runs could still move it."""

    @classmethod
    def of(cls, values: Any) -> Estimate:
        """Over all runs."""
        low, high = np.percentile(values, [2.5, 97.5])
        error = 1.96 * float(np.std(values)) / max(1, len(values)) ** 0.5
        return cls(float(np.mean(values)), float(low), float(high), error)


@dataclass(frozen=True)
class Money:
    """In whatever the price was given in."""

    paid: float
    per_useful_hour: Estimate
    """Of one device."""
    lost: Estimate
    """Paid for time that was not useful."""


@dataclass(frozen=True)
class Outcome:
    """Of one set of inputs."""

    inputs: Inputs
    goodput: Estimate
    """Useful time over elapsed time."""
    failures: Estimate
    lost: dict[str, float]
    """Parts of the elapsed time, on average."""
    money: Money | None
    closed_form: float | None
    """Daly's, where it holds: independent failures, a restart of everything, a node at once."""


def outcome_of(inputs: Inputs) -> Outcome:
    """Simulate, and sum up."""
    runs = simulate(inputs)
    elapsed_s = inputs.days * DAY_S
    goodput = runs.useful / elapsed_s
    return Outcome(
        inputs,
        Estimate.of(goodput),
        Estimate.of(runs.num_failures),
        {name: float(np.mean(values)) / elapsed_s for name, values in runs.lost.items()},
        _money(inputs, runs),
        _closed_form(inputs),
    )


def _money(inputs: Inputs, runs: Runs) -> Money | None:
    if inputs.price_per_device_hour is None:
        return None
    hours = inputs.days * DAY_S / HOUR_S
    devices = (inputs.num_nodes + inputs.spares) * inputs.devices_per_node
    paid = devices * hours * inputs.price_per_device_hour
    useful_hours = runs.useful / HOUR_S * inputs.num_devices
    lost = paid - useful_hours * inputs.price_per_device_hour
    return Money(paid, Estimate.of(paid / np.maximum(useful_hours, 1e-9)), Estimate.of(lost))


def _closed_form(inputs: Inputs) -> float | None:
    always_a_node = inputs.hardware == 0.0
    no_stragglers = inputs.straggler_mtbf_s is None
    if inputs.policy == "live" or not always_a_node or not no_stragglers:
        return None
    if inputs.correlated_per_day:
        return None
    down_s = inputs.detect_s + inputs.restart_s
    return expected_goodput(inputs.checkpoint_interval_s, inputs.save_s, down_s, inputs.mtbf_s)


def what_if(inputs: Inputs, name: str, values: Iterable[Any]) -> list[Outcome]:
    """The same run with one input changed."""
    return [outcome_of(replace(inputs, **{name: value})) for value in values]
