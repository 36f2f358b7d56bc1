"""Goodput against the number of devices, for three ways of dealing with failures."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.plan.simulation.inputs import HOUR_S, Inputs
from drivetrain.plan.simulation.outcome import Outcome, outcome_of
from drivetrain.plan.simulation.published import LLAMA_NODE_MTBF_S

DEVICES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

_COMMON = Inputs(num_nodes=125, node_mtbf_s=LLAMA_NODE_MTBF_S, days=14.0, hardware=0.78)
POLICIES = {
    "a launcher's defaults: noticed by a 10-minute time-out, a save an hour, no spares": replace(
        _COMMON,
        detect_s=600.0,
        restart_s=600.0,
        save_s=60.0,
        interval_s=HOUR_S,
        repair_s=2 * HOUR_S,
    ),
    "supervised: noticed in a minute, saves at the best interval, spares": replace(
        _COMMON, detect_s=60.0, restart_s=180.0, save_s=5.0
    ),
    "live replicas: the others stall for half a minute and go on": replace(
        _COMMON,
        policy="live",
        detect_s=60.0,
        restart_s=180.0,
        save_s=5.0,
        stall_s=30.0,
        num_replicas=8,
    ),
}


def curve(replications: int = 100) -> dict[str, list[Outcome]]:
    """Per policy, one outcome per number of devices."""
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
