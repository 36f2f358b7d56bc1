"""The simulation: one event at a time, for many runs in parallel.

Failures, repairs and stragglers come at exponentially distributed times, which are memoryless: the
next event is drawn again after every event, so the state of a run is a few numbers. Each iteration
advances every run to its own next event; runs that have reached the end do not change.

    running ── failure ──▶ down (detect, restart; wait for a node when there is none) ──▶ running

A failure while down restarts the recovery. Work since the last checkpoint is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.plan.simulation.inputs import DAY_S, Inputs

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass
class Runs:
    """The state of every run, and where its time has gone so far (seconds per run)."""

    clock: Floats
    in_cycle: Floats
    """Running time since the last checkpoint was finished."""
    at_risk: Floats
    """Useful work that is not in a checkpoint yet."""
    down_left: Floats
    """Time until it runs again; 0 while running, infinite while it waits for a node."""
    detecting: Floats
    broken: Whole
    """Number of missing nodes, or with policy live, of missing replicas."""
    slow: Whole
    useful: Floats
    num_failures: Whole
    lost: dict[str, Floats] = field(default_factory=dict)

    @classmethod
    def begin(cls, inputs: Inputs) -> Runs:
        count = inputs.replications
        names = ["saving", "redone work", "detecting", "restarting", "waiting for nodes"]
        names += ["fewer nodes", "stragglers"]
        return cls(
            clock=np.zeros(count),
            in_cycle=np.zeros(count),
            at_risk=np.zeros(count),
            down_left=np.zeros(count),
            detecting=np.zeros(count),
            broken=np.zeros(count, dtype=np.int64),
            slow=np.zeros(count, dtype=np.int64),
            useful=np.zeros(count),
            num_failures=np.zeros(count, dtype=np.int64),
            lost={name: np.zeros(count) for name in names},
        )


def simulate(inputs: Inputs) -> Runs:
    runs, random = Runs.begin(inputs), np.random.default_rng(inputs.seed)
    end_s = inputs.days * DAY_S
    while (active := runs.clock < end_s).any():
        _one_event(inputs, runs, random, active, end_s)
    runs.useful += runs.at_risk  # the run ends with a save
    return runs


def _one_event(
    inputs: Inputs, runs: Runs, random: np.random.Generator, active: Mask, end_s: float
) -> None:
    rates = _rates(inputs, runs)
    total = sum(rates.values())
    until_event = random.exponential(1.0, len(active)) / np.maximum(total, 1e-300)
    until_up = np.where(runs.down_left > 0, runs.down_left, np.inf)
    elapsed = np.minimum(np.minimum(until_event, until_up), end_s - runs.clock)
    elapsed = np.where(active, elapsed, 0.0)
    happens = active & (until_event <= np.minimum(until_up, end_s - runs.clock))
    _pass_time(inputs, runs, elapsed)
    drawn = random.random(len(active)) * total
    reached = np.zeros(len(active))
    for name, rate in rates.items():
        here = happens & (drawn >= reached) & (drawn < reached + rate)
        reached = reached + rate
        _HAPPENINGS[name](inputs, runs, here, random)


def _rates(inputs: Inputs, runs: Runs) -> dict[str, Floats]:
    """Return the rate of each kind of event per second, in the runs' current states."""
    ones = np.ones(len(runs.clock))
    nodes = ones * inputs.num_nodes
    if inputs.policy == "elastic":
        nodes = nodes - np.maximum(0, runs.broken - inputs.spares)
    away_s = inputs.restart_s + inputs.detect_s if inputs.policy == "live" else inputs.repair_s
    rates = {
        "failure": nodes / inputs.node_mtbf_s,
        "correlated": ones * inputs.correlated_per_day / DAY_S,
        "return": runs.broken / away_s,
    }
    if inputs.straggler_mtbf_s is not None:
        rates["slow"] = nodes / inputs.straggler_mtbf_s
        rates["fast again"] = runs.slow / inputs.straggler_s
    return rates


def _pass_time(inputs: Inputs, runs: Runs, elapsed: Floats) -> None:
    is_up = runs.down_left <= 0
    _run_on(inputs, runs, np.where(is_up, elapsed, 0.0))
    down = np.where(is_up, 0.0, elapsed)
    is_waiting = np.isinf(runs.down_left)
    detecting = np.minimum(down, runs.detecting)
    runs.detecting -= detecting
    rest = down - detecting
    runs.lost["detecting"] += detecting
    runs.lost["waiting for nodes"] += np.where(is_waiting, rest, 0.0)
    runs.lost["restarting"] += np.where(is_waiting, 0.0, rest)
    runs.down_left = np.where(is_waiting, np.inf, np.maximum(0.0, runs.down_left - down))
    runs.clock = runs.clock + elapsed


def _run_on(inputs: Inputs, runs: Runs, elapsed: Floats) -> None:
    """Alternate between working and saving; work in a finished save cannot be lost."""
    work_s, save_s = inputs.checkpoint_interval_s, inputs.save_s
    cycle_s = work_s + save_s
    capacity = _capacity(inputs, runs)
    pace = np.where(runs.slow > 0, 1.0 / inputs.straggler_slowdown, 1.0)
    begun = runs.in_cycle
    reached = begun + elapsed
    saves = np.floor(reached / cycle_s)
    after = reached - saves * cycle_s
    worked = saves * work_s + np.minimum(after, work_s) - np.minimum(begun, work_s)
    since_save = np.where(saves > 0, np.minimum(after, work_s), worked)
    done = worked * capacity * pace
    at_risk = since_save * capacity * pace + np.where(saves > 0, 0.0, runs.at_risk)
    runs.useful += runs.at_risk + done - at_risk
    runs.at_risk = at_risk
    runs.in_cycle = after
    runs.lost["saving"] += elapsed - worked
    runs.lost["fewer nodes"] += worked * (1.0 - capacity)
    runs.lost["stragglers"] += worked * capacity * (1.0 - pace)


def _capacity(inputs: Inputs, runs: Runs) -> Floats:
    """Return the available fraction of the full speed."""
    capacity = np.ones(len(runs.clock))
    if inputs.policy == "live":
        capacity -= np.minimum(runs.broken, inputs.num_replicas) / inputs.num_replicas
    elif inputs.policy == "elastic":
        missing = np.maximum(0, runs.broken - inputs.spares)
        capacity -= np.minimum(missing, inputs.num_nodes) / inputs.num_nodes
    return capacity


def _fail(inputs: Inputs, runs: Runs, here: Mask, lost_nodes: Any) -> None:
    runs.num_failures += here
    if inputs.policy == "live":
        _fail_alone(inputs, runs, here, lost_nodes)
        return
    runs.broken += np.where(here, lost_nodes, 0)
    runs.lost["redone work"] += np.where(here, runs.at_risk, 0.0)
    runs.at_risk = np.where(here, 0.0, runs.at_risk)
    runs.in_cycle = np.where(here, 0.0, runs.in_cycle)
    runs.detecting = np.where(here, inputs.detect_s, runs.detecting)
    down = np.full(len(here), inputs.detect_s + inputs.restart_s)
    if inputs.policy == "restart":
        down = np.where(runs.broken > inputs.spares, np.inf, down)
    runs.down_left = np.where(here, np.maximum(down, 1e-9), runs.down_left)


def _fail_alone(inputs: Inputs, runs: Runs, here: Mask, lost_nodes: Any) -> None:
    """Remove one replica; the others lose the current step, stall, and continue."""
    step_s = np.minimum(inputs.step_time_s / 2, runs.at_risk)
    redone = np.where(here, step_s, 0.0)
    runs.lost["redone work"] += redone
    runs.at_risk -= redone
    gone = np.minimum(np.maximum(1, lost_nodes), inputs.num_replicas - runs.broken)
    runs.broken += np.where(here, np.maximum(0, gone), 0)
    stall = max(inputs.stall_s, 1e-9)
    runs.down_left = np.where(here, stall, runs.down_left)


def _single(inputs: Inputs, runs: Runs, here: Mask, random: np.random.Generator) -> None:
    needs_node = random.random(len(here)) < inputs.hardware
    _fail(inputs, runs, here, needs_node.astype(np.int64))


def _correlated(inputs: Inputs, runs: Runs, here: Mask, random: np.random.Generator) -> None:  # noqa: ARG001
    nodes = inputs.correlated_nodes
    if inputs.policy == "live":  # neighbouring nodes mostly belong to one replica
        per_replica = max(1, inputs.num_nodes // inputs.num_replicas)
        nodes = -(-nodes // per_replica)
    _fail(inputs, runs, here, nodes)


def _return(inputs: Inputs, runs: Runs, here: Mask, random: np.random.Generator) -> None:  # noqa: ARG001
    """Bring a node back: waiting runs start, and shrunk runs grow with a planned restart."""
    runs.broken -= here
    if inputs.policy == "restart":
        enough = here & np.isinf(runs.down_left) & (runs.broken <= inputs.spares)
        runs.down_left = np.where(enough, max(inputs.restart_s, 1e-9), runs.down_left)
    elif inputs.policy == "elastic":
        grows = here & (runs.broken >= inputs.spares) & (runs.down_left <= 0)
        runs.useful += np.where(grows, runs.at_risk, 0.0)  # the run saves first
        runs.at_risk = np.where(grows, 0.0, runs.at_risk)
        runs.in_cycle = np.where(grows, 0.0, runs.in_cycle)
        pause = max(inputs.save_s + inputs.restart_s, 1e-9)
        runs.down_left = np.where(grows, pause, runs.down_left)


def _slow(inputs: Inputs, runs: Runs, here: Mask, random: np.random.Generator) -> None:  # noqa: ARG001
    runs.slow += here


def _fast_again(inputs: Inputs, runs: Runs, here: Mask, random: np.random.Generator) -> None:  # noqa: ARG001
    runs.slow -= here


_HAPPENINGS = {
    "failure": _single,
    "correlated": _correlated,
    "return": _return,
    "slow": _slow,
    "fast again": _fast_again,
}
