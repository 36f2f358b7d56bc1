"""Results of simulated runs: goodput and cost, with their intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drivetrain.plan.simulation.engine import Runs, simulate
from drivetrain.plan.simulation.inputs import DAY_S, HOUR_S, Inputs, expected_goodput
from drivetrain.plan.simulation.published import LLAMA_NODE_MTBF_S


@dataclass(frozen=True)
class MeanOverRuns:
    """A mean over runs, and the range of 95% of single runs."""

    mean: float
    low: float
    high: float
    error: float = 0.0
    """Half of the mean's own 95% interval: how far more runs could still change it."""

    @classmethod
    def of(cls, values: Any) -> MeanOverRuns:
        low, high = np.percentile(values, [2.5, 97.5])
        error = 1.96 * float(np.std(values)) / max(1, len(values)) ** 0.5
        return cls(float(np.mean(values)), float(low), float(high), error)


@dataclass(frozen=True)
class SimulatedMoney:
    """Costs, in the currency of the given price."""

    paid: float
    per_useful_hour: MeanOverRuns
    """Cost per useful hour of one device."""
    lost: MeanOverRuns
    """Paid for time that was not useful."""


@dataclass(frozen=True)
class SimulatedOutcome:
    """The result for one set of inputs."""

    inputs: Inputs
    goodput: MeanOverRuns
    """Useful time over elapsed time."""
    failures: MeanOverRuns
    lost: dict[str, float]
    """Mean fractions of the elapsed time, by cause."""
    money: SimulatedMoney | None
    closed_form: float | None
    """Daly's formula, where it applies: independent failures, full restarts, and a node always
    available."""


def outcome_of(inputs: Inputs) -> SimulatedOutcome:
    """Simulate and summarize."""
    runs = simulate(inputs)
    elapsed_s = inputs.days * DAY_S
    goodput = runs.useful / elapsed_s
    return SimulatedOutcome(
        inputs,
        MeanOverRuns.of(goodput),
        MeanOverRuns.of(runs.num_failures),
        {name: float(np.mean(values)) / elapsed_s for name, values in runs.lost.items()},
        _money(inputs, runs),
        _closed_form(inputs),
    )


def _money(inputs: Inputs, runs: Runs) -> SimulatedMoney | None:
    if inputs.price_per_device_hour is None:
        return None
    hours = inputs.days * DAY_S / HOUR_S
    devices = (inputs.num_nodes + inputs.spares) * inputs.devices_per_node
    paid = devices * hours * inputs.price_per_device_hour
    useful_hours = runs.useful / HOUR_S * inputs.num_devices
    lost = paid - useful_hours * inputs.price_per_device_hour
    return SimulatedMoney(
        paid, MeanOverRuns.of(paid / np.maximum(useful_hours, 1e-9)), MeanOverRuns.of(lost)
    )


def _closed_form(inputs: Inputs) -> float | None:
    always_a_node = inputs.hardware == 0.0
    no_stragglers = inputs.straggler_mtbf_s is None
    if inputs.policy == "live" or not always_a_node or not no_stragglers:
        return None
    if inputs.correlated_per_day:
        return None
    down_s = inputs.detect_s + inputs.restart_s
    return expected_goodput(inputs.checkpoint_interval_s, inputs.save_s, down_s, inputs.mtbf_s)


def what_if(inputs: Inputs, name: str, values: Iterable[Any]) -> list[SimulatedOutcome]:
    """Return the outcomes of the same run for several values of one input."""
    return [outcome_of(replace(inputs, **{name: value})) for value in values]


# Goodput by number of devices, for three ways of handling failures.

DEVICES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

_COMMON = Inputs(num_nodes=125, node_mtbf_s=LLAMA_NODE_MTBF_S, days=14.0, hardware=0.78)
POLICIES = {
    "a launcher's defaults: detected by a 10-minute timeout, hourly saves, no spares": replace(
        _COMMON,
        detect_s=600.0,
        restart_s=600.0,
        save_s=60.0,
        interval_s=HOUR_S,
        repair_s=2 * HOUR_S,
    ),
    "supervised: detected in a minute, saves at the best interval, spares": replace(
        _COMMON, detect_s=60.0, restart_s=180.0, save_s=5.0
    ),
    "live replicas: the others stall for half a minute and continue": replace(
        _COMMON,
        policy="live",
        detect_s=60.0,
        restart_s=180.0,
        save_s=5.0,
        stall_s=30.0,
        num_replicas=8,
    ),
}


def curve(replications: int = 100) -> dict[str, list[SimulatedOutcome]]:
    """Return, per policy, one outcome per number of devices."""
    return {
        name: [outcome_of(_at(inputs, devices, replications)) for devices in DEVICES]
        for name, inputs in POLICIES.items()
    }


def _at(inputs: Inputs, devices: int, replications: int) -> Inputs:
    nodes = devices // inputs.devices_per_node
    has_spares = inputs.save_s < 60.0
    return replace(
        inputs,
        num_nodes=nodes,
        spares=max(2, nodes // 50) if has_spares else 0,
        replications=replications,
    )
