"""What a simulated run is made of, and what can be said of it without simulating."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from drivetrain.core.errors import ConfigError, Problem

# What can be said without simulating: Young's and Daly's formulas, for independent failures.


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly's optimum: running time between two saves.

    J. Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37.
    """
    if save_s <= 0:
        return mtbf_s / 100  # saving is free: often enough
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_goodput(interval_s: float, save_s: float, down_s: float, mtbf_s: float) -> float:
    """Useful time over elapsed time when everything restarts after each failure.

    Exact for exponential failures, which may also strike while the run is coming back.
    """
    per_interval_s = mtbf_s * math.exp(down_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    return interval_s / per_interval_s


# What a simulated run is made of; every figure of it is stated with the result.

Policy = Literal["restart", "elastic", "live"]
DAY_S, HOUR_S = 86_400.0, 3_600.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S, "d": DAY_S, "y": 365 * DAY_S}


@dataclass(frozen=True)
class Inputs:
    """Times in seconds. A node is what fails and is replaced as one."""

    num_nodes: int
    node_mtbf_s: float
    """Between two failures of one node, whatever their cause."""
    days: float = 30.0
    devices_per_node: int = 8
    policy: Policy = "restart"
    """restart: all nodes, from the last checkpoint. elastic: the same, and without a spare the run
    goes on with fewer nodes. live: only the replica that failed, the others go on."""
    step_time_s: float = 10.0
    interval_s: float | None = None
    """Between two checkpoints, of running time; None: Daly's optimum."""
    save_s: float = 30.0
    """For which a checkpoint holds up the run."""
    detect_s: float = 60.0
    restart_s: float = 300.0
    """From the decision to the next step: processes, process groups, loading."""
    hardware: float = 0.8
    """Part of the failures after which a node must be replaced; the others only restart."""
    repair_s: float = DAY_S
    """Until a replaced node is back."""
    spares: int = 0
    """Nodes kept ready, and paid for."""
    num_replicas: int = 1
    """live: copies of the model, each of which can be away by itself."""
    stall_s: float = 30.0
    """live: for which the others wait when a replica fails."""
    correlated_per_day: float = 0.0
    """Events that take several nodes at once (a switch, a power feed), of the whole cluster."""
    correlated_nodes: int = 16
    straggler_mtbf_s: float | None = None
    """Between two times that one node becomes slow; None: never."""
    straggler_slowdown: float = 1.3
    """A step takes so many times as long while any node is slow."""
    straggler_s: float = 2 * HOUR_S
    """Until a slow node is found and replaced."""
    price_per_device_hour: float | None = None
    replications: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [*self._not_positive(), *self._out_of_range()]
        if problems:
            raise ConfigError(problems)

    @property
    def mtbf_s(self) -> float:
        """Between two failures anywhere, single or correlated."""
        rate = self.num_nodes / self.node_mtbf_s + self.correlated_per_day / DAY_S
        return 1.0 / rate

    @property
    def checkpoint_interval_s(self) -> float:
        """What was asked for, or the optimum; whole steps."""
        if self.interval_s is not None:
            return self.interval_s
        best = best_interval_s(self.save_s, self.mtbf_s)
        return max(1, round(best / self.step_time_s)) * self.step_time_s

    @property
    def num_devices(self) -> int:
        """Those that train."""
        return self.num_nodes * self.devices_per_node

    def _not_positive(self) -> list[Problem]:
        names = ["num_nodes", "node_mtbf_s", "days", "devices_per_node", "step_time_s"]
        names += ["repair_s", "num_replicas", "replications", "straggler_s"]
        return [
            Problem(option(name), "must be more than 0", "give a positive number", value)
            for name in names
            if (value := getattr(self, name)) <= 0
        ]

    def _out_of_range(self) -> list[Problem]:
        problems = [
            Problem(option(name), "cannot be negative", "use 0 or more", value)
            for name in ("save_s", "detect_s", "restart_s", "spares", "correlated_per_day")
            if (value := getattr(self, name)) < 0
        ]
        if not 0 <= self.hardware <= 1:
            problems.append(Problem("--hardware", "a part", "use 0 to 1", self.hardware))
        if self.straggler_slowdown < 1:
            rule = "slow is longer"
            problems.append(
                Problem("--straggler-slowdown", rule, "use 1 or more", self.straggler_slowdown)
            )
        if self.correlated_nodes > self.num_nodes:
            rule = f"there are {self.num_nodes} nodes"
            problems.append(Problem("--correlated", rule, "take fewer", self.correlated_nodes))
        if self.policy == "live" and self.num_replicas < 2:
            rule = "live needs replicas that can continue without the one that failed"
            problems.append(Problem("--replicas", rule, "use 2 or more", self.num_replicas))
        if self.interval_s is not None and self.interval_s <= 0:
            rule = "must be more than 0"
            problems.append(Problem("--checkpoint-interval", rule, "or auto", self.interval_s))
        return problems


_OPTIONS = {"num_nodes": "nodes", "node_mtbf_s": "mtbf", "num_replicas": "replicas"}


def option(name: str) -> str:
    """The command-line option of a field."""
    return "--" + _OPTIONS.get(name, name.removesuffix("_s")).replace("_", "-")


def seconds(text: str, where: str) -> float:
    """'90', '10m', '2.78h' or '54d', in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError([Problem(where, "not a time", "write 30s, 10m, 2.5h or 54d", text)])
    return float(found[1]) * _UNITS[found[2]]


def names() -> list[str]:
    return [field.name for field in fields(Inputs)]
