"""Cluster: nodes × devices and the links between them, as used by strategies and the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One device, described by achieved rates, not by its data sheet's peaks."""

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    """Floating-point operations per second in large matrix products, by precision."""
    memory_bytes_per_s: float
    """Memory bandwidth of operations other than matrix products."""
    operation_s: float = 0.0
    """Fixed overhead of one operation."""
    is_accelerator: bool = True
    overlap: float = 0.9
    """Fraction of communication that can overlap with computation, if the program allows it."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Peak rate from the data sheet, by precision; used only to report utilisation."""
    small_product_flops: float = 0.0
    """A product with this many operations runs at half the rate of a large one. 0: not known."""
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    """Operations per second in fused attention, by precision. Empty: as in matrix products."""
    curved_bytes_per_s: float = 0.0
    """Memory bandwidth of exponentials, roots and means. 0: as for other operations."""
    shared_product_s: float = 0.0
    """Host overhead of a matrix product that tp ranks share, besides its work."""
    sharded_unit_s: float = 0.0
    """Host overhead of fsdp per block and micro-batch, besides communication."""


@dataclass(frozen=True)
class Link:
    """Bandwidth from one device to its neighbour in a ring, and the latency of a message."""

    bytes_per_s: float
    latency_s: float = 0.0
    by_kind: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(bytes per second, seconds) of collectives that were measured separately, by kind."""


@dataclass(frozen=True)
class Cluster:
    """The hardware that the ranks run on. None: not known."""

    num_nodes: int = 1
    devices_per_node: int = 1
    device_memory_bytes: int | None = None
    device: Device | None = None
    inside: Link | None = None
    """Link between devices of one node."""
    between: Link | None = None
    """Link between nodes, per device, with all devices communicating."""
    host_memory_bytes: int | None = None
    """Host memory per node."""
    host_link: Link | None = None
    """Link from a device to its host's memory."""
    storage_bytes_per_s: float | None = None
    """Write bandwidth of one node to storage."""
    price_per_node_hour: float | None = None
    name: str = ""

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        return self.num_nodes * self.devices_per_node
