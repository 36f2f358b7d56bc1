"""From what a probe measured to a cluster file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median
from typing import Any

import yaml

from drivetrain.cluster.catalogue import DeviceEntry, LinkEntry
from drivetrain.cluster.file import ClusterFile


def cluster_file(found: Mapping[str, Any]) -> ClusterFile:
    """Every figure as measured; `achieved` is therefore 1."""
    per_node = int(found["ranks_per_node"])
    is_host = found["device"] == "cpu"
    rates = {name: _large(products) for name, products in found["products"].items()}
    small = _small(found["products"]["fp32"])
    memory = found.get("memory_bytes") or _host_bytes() / per_node
    device = DeviceEntry(
        name=str(found["device"]),
        memory_gib=memory / 2**30,
        peak_tflops={name: rate / 1e12 for name, rate in rates.items()},
        achieved=1.0,
        memory_gb_per_s=found["memory_bytes_per_s"] / 1e9,
        memory_achieved=1.0,
        operation_us=found["operation_s"] * 1e6,
        overlap=0.0 if is_host else 0.9,
        is_accelerator=not is_host,
        small_product_gflop=small / 1e9,
        attention_tflops={n: rate / 1e12 for n, rate in found["attention_flops"].items()},
        curved_gb_per_s=found["curved_bytes_per_s"] / 1e9,
        shared_product_us=found["exchange_overheads"]["tp"] * 1e6,
        sharded_unit_us=found["exchange_overheads"]["fsdp"] * 1e6,
        source="drivetrain probe",
    )
    link = _link(found["exchange"], int(found["ranks"]))
    return ClusterFile(
        name="probed",
        nodes=max(1, int(found["ranks"]) // per_node),
        devices_per_node=per_node,
        device=device,
        inside=link,
        between=link,
        host_memory_gb=_host_bytes() / 1e9,
        storage_gb_per_s=found["storage_bytes_per_s"] / 1e9,
        measured=dict(found),
    )


def to_yaml(file: ClusterFile) -> str:
    """As it is read again."""
    document = _rounded(file.model_dump(mode="json", exclude_none=True))
    return "# written by `drivetrain probe`\n" + str(yaml.safe_dump(document, sort_keys=False))


def _rounded(value: Any) -> Any:
    """Four digits, which is more than a measurement is good for."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _least_large_side(products: Mapping[Any, float]) -> float:
    """From where on products count as large; an accelerator needs larger ones than a host."""
    return max(map(int, products)) / 4


def _large(products: Mapping[Any, float]) -> float:
    """Of large products, the middle one: a single one may have had the machine to itself."""
    least = _least_large_side(products)
    return median(rate for side, rate in products.items() if int(side) >= least)


def _small(products: Mapping[Any, float]) -> float:
    """Operations at which a product reaches half the best rate: rate = best · f / (f + small).

    By small products only: a large one that is slower than others is so for other reasons.
    """
    best, least = _large(products), _least_large_side(products)
    wanted = [
        2.0 * float(side) ** 3 * max(0.0, best / rate - 1.0)
        for side, rate in products.items()
        if int(side) < least
    ]
    return median(wanted) if wanted else 0.0


def _link(exchange: Mapping[str, Mapping[Any, float]], ranks: int) -> LinkEntry:
    """Each collective by itself: libraries do some of them in other ways than as a ring."""
    if not exchange:
        return LinkEntry(gb_per_s=10.0, source="not measured: one rank")
    measured = {kind: _as_ring(kind, times, ranks) for kind, times in exchange.items()}
    rate, latency_us = measured["all_reduce"]
    return LinkEntry(
        gb_per_s=rate, latency_us=latency_us, by_kind=measured, source="drivetrain probe"
    )


def _as_ring(kind: str, measured: Mapping[Any, float], ranks: int) -> tuple[float, float]:
    """(GB/s, µs) of a ring that takes as long: rate by the two largest, latency by the smallest."""
    times = {int(size): seconds for size, seconds in measured.items()}
    passes = (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks
    hops = (ranks - 1) * (2.0 if kind == "all_reduce" else 1.0)
    small, (low, large) = min(times), sorted(times)[-2:]
    per_byte = max(1e-13, (times[large] - times[low]) / (large - low))
    latency = max(0.0, times[small] - per_byte * small) / hops
    return passes / per_byte / 1e9, latency * 1e6


def _host_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
