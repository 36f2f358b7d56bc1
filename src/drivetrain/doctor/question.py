"""Derive what to examine from the arguments of `drivetrain train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drivetrain.cluster.catalogue import catalogue
from drivetrain.cluster.description import Link
from drivetrain.cluster.file import cluster_from, link_of, read_cluster
from drivetrain.config.keys import flatten
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.doctor.facts import Expected, Timeouts


@dataclass(frozen=True)
class TrainFlags:
    """The part of a command line that the doctor reads: flags by name, config values by key."""

    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_train_flags(argv: Sequence[str]) -> TrainFlags:
    """Parse flags with values and `key=value`; everything else belongs to the script."""
    flags: dict[str, str] = {}
    values: dict[str, Any] = {}
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            if not has_value and queue and not queue[0].startswith("-"):
                value = queue[0]
            flags[name] = value
            if name == "--config":
                values = {**_config(value), **values}
        elif has_value:
            values[name] = yaml.safe_load(value)
    return TrainFlags(flags, values)


def _config(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        remedy = "give the path of a YAML file"
        raise ConfigError([Problem("--config", "cannot be read", remedy, path)]) from None
    return dict(flatten(content or {}))


def timeouts_of(given: TrainFlags, target_grace_s: float | None = None) -> Timeouts:
    """Return the timeouts that were given, and defaults for the rest."""
    usual = Timeouts()
    return Timeouts(
        collective_s=_seconds("parallel.timeout_s", given.values, usual.collective_s),
        stall_s=_seconds("--stall-timeout", given.flags, usual.stall_s),
        slow_s=_seconds("--slow-timeout", given.flags, usual.slow_s),
        grace_s=_seconds("--grace-period", given.flags, usual.grace_s),
        keep_alive_s=_keep_alive(given),
        target_grace_s=target_grace_s,
    )


def _keep_alive(given: TrainFlags) -> float | None:
    pairs = (part.partition("=") for part in given.flags.get("--rdzv-conf", "").split(","))
    settings = {name.strip(): value for name, _, value in pairs}
    if not {"keep_alive_interval", "keep_alive_max_attempt"} & set(settings):
        return None
    interval = _seconds("keep_alive_interval", settings, 5.0)  # torch's own defaults
    return interval * _seconds("keep_alive_max_attempt", settings, 3.0)


def ports_of(given: TrainFlags, ports: Sequence[int]) -> tuple[int, ...]:
    """Return the doctor's own ports and those of the run's rendezvous."""
    named = [given.flags.get("--rdzv-endpoint", "").rpartition(":")[2]]
    named += [given.flags.get("--master-port", "")]
    found = [*ports, *(int(port) for port in named if port.isdigit() and int(port))]
    for port in found:
        if not 0 < port < 65536:
            raise ConfigError([Problem("--port", "not a port number", "use 1 to 65535", port)])
    return tuple(dict.fromkeys(found))


def _seconds(name: str, among: dict[str, Any], usual: float) -> float:
    value = among.get(name)
    if value is None:
        return usual
    try:
        return float(value)
    except (TypeError, ValueError):
        problem = Problem(name, "must be a number of seconds", "for example 60", value)
        raise ConfigError([problem]) from None


def read_expected(said: str) -> Expected:
    """Read a cluster file or a name from the catalogue; a file may describe only the network."""
    given = read_cluster(said)
    if given.device is None and given.instance is None:
        link = None if given.between is None else link_of(given.between, catalogue())
        return _expected(link, given.devices_per_node)
    cluster = cluster_from(given)
    has_devices = cluster.device is not None and cluster.device.is_accelerator
    return _expected(cluster.between, cluster.devices_per_node if has_devices else None)


def _expected(link: Link | None, num_devices: int | None) -> Expected:
    """Build Expected; a latency of 0 means that none was given."""
    return Expected(
        bytes_per_s=None if link is None else link.bytes_per_s,
        latency_s=None if link is None else link.latency_s or None,
        devices_per_node=num_devices,
    )
