"""The catalogue: real devices, instances and links, each with the source of its figures.

The figures are in catalogue.yaml next to this file. A data sheet states peaks; `achieved` is the
fraction that a program reaches: of the rate of matrix products, of memory bandwidth, of a link.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from drivetrain.cluster.description import Device, Link
from drivetrain.core.section import Section


class LinkEntry(Section):
    """A link; its figures are per device and direction."""

    gb_per_s: float = Field(gt=0)
    """Bandwidth in one direction, from the data sheet."""
    achieved: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the bandwidth that a large collective reaches."""
    latency_us: float = Field(default=0.0, ge=0)
    """Latency of one step of a ring."""
    by_kind: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """(GB per second, microseconds) of collectives that were measured separately."""
    source: str = ""
    """Where the figures are from."""

    def to_link(self) -> Link:
        measured = {kind: (rate * 1e9, us * 1e-6) for kind, (rate, us) in self.by_kind.items()}
        return Link(self.gb_per_s * 1e9 * self.achieved, self.latency_us * 1e-6, measured)


class DeviceEntry(Section):
    """A device."""

    name: str = ""
    """Name of the device."""
    memory_gib: float = Field(gt=0)
    """Memory that a program can use."""
    peak_tflops: dict[str, float]
    """Dense peak rate, by precision."""
    achieved: float | dict[str, float] = 1.0
    """Fraction of the peak rate that a large matrix product reaches."""
    memory_gb_per_s: float = Field(gt=0)
    """Peak memory bandwidth."""
    memory_achieved: float = Field(default=0.8, gt=0, le=1)
    """Fraction of the memory bandwidth that element-wise operations reach."""
    operation_us: float = Field(default=5.0, ge=0)
    """Fixed overhead of one operation."""
    overlap: float = Field(default=0.9, ge=0, le=1)
    """Fraction of communication that can overlap with computation."""
    is_accelerator: bool = True
    """Whether the device has its own memory."""
    small_product_gflop: float = Field(default=0.0, ge=0)
    """A matrix product of this size reaches half the rate of a large one."""
    attention_tflops: dict[str, float] = Field(default_factory=dict)
    """Rate of fused attention, by precision. Empty: as for matrix products."""
    curved_gb_per_s: float = Field(default=0.0, ge=0)
    """Memory bandwidth of exponentials, roots and means. 0: as for other operations."""
    shared_product_us: float = Field(default=0.0, ge=0)
    """Overhead of a matrix product that tp ranks share, besides its work."""
    sharded_unit_us: float = Field(default=0.0, ge=0)
    """Overhead of fsdp per block and micro-batch, besides communication."""
    inside: str | LinkEntry = "pcie-3"
    """Link to other devices of the same node."""
    between: str | LinkEntry = "ethernet-10"
    """Default link to other nodes."""
    host_gb_per_s: float = 12.0
    """Bandwidth to the host's memory."""
    source: str = ""
    """Where the figures are from."""

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes."""
        return int(self.memory_gib * 2**30)

    def to_device(self) -> Device:
        part = self.achieved
        flops = {
            precision: peak * 1e12 * (part if isinstance(part, float) else part.get(precision, 0.7))
            for precision, peak in self.peak_tflops.items()
        }
        return Device(
            name=self.name,
            memory_bytes=self.memory_bytes,
            flops=flops,
            memory_bytes_per_s=self.memory_gb_per_s * 1e9 * self.memory_achieved,
            operation_s=self.operation_us * 1e-6,
            is_accelerator=self.is_accelerator,
            overlap=self.overlap,
            peak_flops={p: peak * 1e12 for p, peak in self.peak_tflops.items()},
            small_product_flops=self.small_product_gflop * 1e9,
            attention_flops={p: rate * 1e12 for p, rate in self.attention_tflops.items()},
            curved_bytes_per_s=self.curved_gb_per_s * 1e9,
            shared_product_s=self.shared_product_us * 1e-6,
            sharded_unit_s=self.sharded_unit_us * 1e-6,
        )


class InstanceEntry(Section):
    """A cloud instance."""

    device: str
    """Name of a device in the catalogue."""
    devices_per_node: int
    """Number of devices in a node."""
    inside: str | None = None
    """Link inside a node, if it differs from the device's own."""
    between: LinkEntry
    """Network between nodes, per device."""
    host_memory_gb: float
    """Host memory of a node."""
    storage_gb_per_s: float
    """Assumed bandwidth to a shared file system or object store, per node."""
    price_per_node_hour: float
    """On-demand list price in US dollars."""
    source: str
    """Where the figures are from."""

    def settings(self) -> dict[str, Any]:
        """Return the values as a cluster file would contain them."""
        return self.model_dump(exclude={"source"}, exclude_none=True)


class Catalogue(Section):
    """All devices, links and instances, by name."""

    devices: dict[str, DeviceEntry]
    """Devices by name."""
    links: dict[str, LinkEntry]
    """Links by name."""
    instances: dict[str, InstanceEntry]
    """Cloud instances by name."""


@cache
def catalogue() -> Catalogue:
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    return Catalogue.model_validate(yaml.safe_load(text))


# Peak rates of known devices: dense bf16 or fp16 operations per second.
#
# From the makers' data sheets, without sparsity. GeForce cards accumulate 16-bit products in fp32,
# as training does, at half the advertised rate; the table has that half. A name is exactly what the
# driver calls a device, so that an L40 is not taken for an L4, or an RTX A1000 for an A100; a slice
# of a device (MIG, vGPU) has its own name. A device that is not listed has no peak, rather than
# another device's.
#
# Left out, because one name stands for several peaks: "AMD Instinct MI250X/MI250" (two products),
# "Intel(R) Data Center GPU Max 1550" (one of its tiles, or both), "NVIDIA H100 80GB HBM2e" (several
# boards).

_TERA = 1e12
PEAK_16_BIT_TFLOPS = {
    "NVIDIA GB300": 2500,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA B200": 2250,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,  # SXM
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H800": 989,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A40": 150,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX A6000": 155,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla V100-SXM3-32GB": 125,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100-PCIE-32GB": 112,
    "Tesla T4": 65,
    "AMD Instinct MI355X": 2516,
    "AMD Instinct MI350X": 2300,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI300X VF": 1307,
    "AMD Instinct MI250X": 191.5,  # one of its two dies: a program sees each as a device
    "AMD Instinct MI210": 181,
    "GAUDI3": 1835,
    "GAUDI2": 432,
    "Intel(R) Data Center GPU Max 1100": 352,
}
_BY_NAME = {name.casefold(): tflops * _TERA for name, tflops in PEAK_16_BIT_TFLOPS.items()}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by the driver's name for it; None if it is not known."""
    name = " ".join(device_name.split()).casefold()
    # drivers before 510 left the maker's name out: "A100-SXM4-40GB"
    return _BY_NAME.get(name) or _BY_NAME.get(f"nvidia {name}")
