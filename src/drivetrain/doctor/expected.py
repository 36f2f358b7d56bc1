"""What the cluster file promises, as far as the doctor can measure it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.doctor.facts import Expected


def read_expected(path: str | Path) -> Expected:
    """`devices_per_node`, and the link `between` nodes: gb_per_s, achieved and latency_us."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "is no YAML"
        raise ConfigError([Problem("--cluster", str(reason), "name a file", str(path))]) from None
    remedy = "write `between: {gb_per_s: 12.5, latency_us: 30}`"
    if not isinstance(content, dict):
        raise ConfigError([Problem("--cluster", "describes no cluster", remedy, str(path))])
    link = content.get("between") or {}
    if not isinstance(link, dict):
        raise ConfigError([Problem("cluster.between", "needs its figures here", remedy, link)])
    rate, latency_us = _number(link, "gb_per_s"), _number(link, "latency_us")
    achieved = _number(link, "achieved")
    devices = _number(content, "devices_per_node")
    return Expected(
        bytes_per_s=None if rate is None else rate * 1e9 * (1.0 if achieved is None else achieved),
        latency_s=None if latency_us is None else latency_us / 1e6,
        devices_per_node=None if devices is None else int(devices),
    )


def _number(section: dict[str, Any], name: str) -> float | None:
    value = section.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError([Problem(f"cluster: {name}", "is no quantity", "use a number", value)])
    return float(value)
