"""Inputs of a simulated run, and results that need no simulation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from drivetrain.core.errors import ConfigError, Problem

# Results without simulation: Young's and Daly's formulas, for independent failures.


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return Daly's optimum of the running time between two saves.

    J. Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37.
    """
    if save_s <= 0:
        return mtbf_s / 100  # saving is free: any interval that is short enough
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_goodput(interval_s: float, save_s: float, down_s: float, mtbf_s: float) -> float:
    """Return useful time over elapsed time if everything restarts after each failure.

    Exact for exponentially distributed failures, which may also happen during a restart.
    """
    per_interval_s = mtbf_s * math.exp(down_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    return interval_s / per_interval_s


# The inputs of a simulated run; all of them are shown with the result.

Policy = Literal["restart", "elastic", "live"]
DAY_S, HOUR_S = 86_400.0, 3_600.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": HOUR_S, "d": DAY_S, "y": 365 * DAY_S}


@dataclass(frozen=True)
class Inputs:
    """Inputs of a simulation. Times are in seconds; a node fails and is replaced as a unit."""

    num_nodes: int
    node_mtbf_s: float
    """Mean time between failures of one node, from any cause."""
    days: float = 30.0
    devices_per_node: int = 8
    policy: Policy = "restart"
    """restart: restart all nodes from the last checkpoint. elastic: the same, but without a spare
    continue with fewer nodes. live: restart only the failed replica while the others continue."""
    step_time_s: float = 10.0
    interval_s: float | None = None
    """Running time between two checkpoints; None: Daly's optimum."""
    save_s: float = 30.0
    """Seconds a checkpoint blocks training."""
    detect_s: float = 60.0
    restart_s: float = 300.0
    """From the decision to the next step: processes, process groups, loading."""
    hardware: float = 0.8
    """Fraction of failures after which a node must be replaced; the others only restart."""
    repair_s: float = DAY_S
    """Time until a replaced node is back."""
    spares: int = 0
    """Nodes kept ready, and paid for."""
    num_replicas: int = 1
    """live: copies of the model, each of which can be missing independently."""
    stall_s: float = 30.0
    """live: time that the others wait when a replica fails."""
    correlated_per_day: float = 0.0
    """Events per day in the whole cluster that affect several nodes (a switch, a power feed)."""
    correlated_nodes: int = 16
    straggler_mtbf_s: float | None = None
    """Mean time until one node becomes slow; None: never."""
    straggler_slowdown: float = 1.3
    """Factor on the step time while any node is slow."""
    straggler_s: float = 2 * HOUR_S
    """Time until a slow node is found and replaced."""
    price_per_device_hour: float | None = None
    replications: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [*self._not_positive(), *self._out_of_range()]
        if problems:
            raise ConfigError(problems)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures anywhere, single or correlated."""
        rate = self.num_nodes / self.node_mtbf_s + self.correlated_per_day / DAY_S
        return 1.0 / rate

    @property
    def checkpoint_interval_s(self) -> float:
        """The given interval, or the optimum rounded to whole steps."""
        if self.interval_s is not None:
            return self.interval_s
        best = best_interval_s(self.save_s, self.mtbf_s)
        return max(1, round(best / self.step_time_s)) * self.step_time_s

    @property
    def num_devices(self) -> int:
        """Devices that train, without spares."""
        return self.num_nodes * self.devices_per_node

    def _not_positive(self) -> list[Problem]:
        names = ["num_nodes", "node_mtbf_s", "days", "devices_per_node", "step_time_s"]
        names += ["repair_s", "num_replicas", "replications", "straggler_s"]
        return [
            Problem(option(name), "must be more than 0", "give a positive number", value)
            for name in names
            if not (value := getattr(self, name)) > 0
        ]

    def _out_of_range(self) -> list[Problem]:
        problems = [
            Problem(option(name), "cannot be negative", "use 0 or more", value)
            for name in ("save_s", "detect_s", "restart_s", "spares", "correlated_per_day")
            if (value := getattr(self, name)) < 0
        ]
        if not 0 <= self.hardware <= 1:
            problems.append(Problem("--hardware", "is a fraction", "use 0 to 1", self.hardware))
        if self.price_per_device_hour is not None and not self.price_per_device_hour >= 0:
            rule = "must be 0 or more"
            problems.append(Problem("--price", rule, "--price 2.5", self.price_per_device_hour))
        if self.straggler_slowdown < 1:
            rule = "a slowdown cannot be less than 1"
            problems.append(Problem("--stragglers", rule, "use 1 or more", self.straggler_slowdown))
        if self.correlated_per_day and self.correlated_nodes > self.num_nodes:
            rule = f"there are {self.num_nodes} nodes"
            problems.append(Problem("--correlated", rule, "use fewer", self.correlated_nodes))
        if self.policy == "live" and self.num_replicas < 2:
            rule = "live needs replicas that can continue without the one that failed"
            problems.append(Problem("--replicas", rule, "use 2 or more", self.num_replicas))
        if self.interval_s is not None and self.interval_s <= 0:
            rule = "must be more than 0"
            problems.append(
                Problem("--checkpoint-interval", rule, "give a duration, or auto", self.interval_s)
            )
        return problems


_OPTIONS = {
    "num_nodes": "nodes",
    "node_mtbf_s": "mtbf",
    "num_replicas": "replicas",
    "save_s": "save-cost",
    "straggler_s": "stragglers",
    "correlated_per_day": "correlated",
}


def option(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + _OPTIONS.get(name, name.removesuffix("_s")).replace("_", "-")


def seconds(text: str, where: str) -> float:
    """Convert '90', '10m', '2.78h' or '54d' to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError([Problem(where, "not a duration", "write 30s, 10m, 2.5h or 54d", text)])
    return float(found[1]) * _UNITS[found[2]]


def names() -> list[str]:
    return [field.name for field in fields(Inputs)]
