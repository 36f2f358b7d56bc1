"""What the cluster file promises, as far as the doctor can measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.doctor.facts import Expected


def read_expected(path: str | Path) -> Expected:
    """`devices_per_node`, and bandwidth and latency of the link `between_nodes`."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "is no YAML"
        raise ConfigError([Problem("--cluster", str(reason), "name a file", str(path))]) from None
    if not isinstance(content, dict):
        remedy = "write `between_nodes: {bandwidth_gbit_per_s: 100}`"
        raise ConfigError([Problem("--cluster", "describes no cluster", remedy, str(path))])
    link = content.get("between_nodes") or {}
    rate = _number(link, "bandwidth_bytes_per_s")
    gbit = _number(link, "bandwidth_gbit_per_s")
    devices = _number(content, "devices_per_node")
    return Expected(
        bytes_per_s=gbit * 1e9 / 8 if gbit is not None else rate,
        latency_s=_number(link, "latency_s"),
        devices_per_node=None if devices is None else int(devices),
    )


def _number(section: Any, name: str) -> float | None:
    value = section.get(name) if isinstance(section, dict) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError([Problem(f"--cluster: {name}", "is no quantity", "use a number", value)])
    return float(value)
