"""Cluster: nodes × devices and the links between them, as a strategy and the planner see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One device, by what it does and not by what its data sheet promises."""

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    """Floating-point operations a second in large matrix products, by precision."""
    memory_bytes_per_s: float
    """What operations other than products read and write."""
    operation_s: float = 0.0
    """What one operation costs even when there is nothing to do in it."""
    is_accelerator: bool = True
    overlap: float = 0.9
    """The part of an exchange that can go on beside computing, where the program lets it."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """By the data sheet; only to state a utilisation."""
    small_product_flops: float = 0.0
    """A product with so many operations runs at half the rate of a large one; 0: not known."""
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    """Operations a second in fused attention, by precision; empty: as in products."""
    curved_bytes_per_s: float = 0.0
    """What exponentials, roots and means read and write; 0: as all others."""
    shared_product_s: float = 0.0
    """What a product costs the host beside its work when tp ranks share it."""
    sharded_unit_s: float = 0.0
    """What fsdp costs the host per block and micro-batch beside what it sends."""


@dataclass(frozen=True)
class Link:
    """What one device can send to its neighbour in a ring, and how long an empty message takes."""

    bytes_per_s: float
    latency_s: float = 0.0
    by_kind: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(bytes a second, seconds) of kinds of collectives that were measured by themselves."""


@dataclass(frozen=True)
class Cluster:
    """What the ranks run on. Memory is per device; None where it is not known."""

    num_nodes: int = 1
    devices_per_node: int = 1
    device_memory_bytes: int | None = None
    device: Device | None = None
    inside: Link | None = None
    """Between devices of one node."""
    between: Link | None = None
    """Between nodes, per device when all of them talk."""
    host_memory_bytes: int | None = None
    """Per node."""
    host_link: Link | None = None
    """From a device to its host's memory."""
    storage_bytes_per_s: float | None = None
    """What one node can write."""
    price_per_node_hour: float | None = None
    name: str = ""

    @property
    def num_devices(self) -> int:
        """In all nodes."""
        return self.num_nodes * self.devices_per_node
