"""Cluster: nodes × devices, as far as a strategy needs to know them to judge a layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """What the ranks run on. Memory is per device; None where it is not known."""

    num_nodes: int = 1
    devices_per_node: int = 1
    device_memory_bytes: int | None = None
