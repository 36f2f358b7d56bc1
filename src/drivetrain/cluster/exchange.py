"""The time of a collective by size: a latency and a rate, fitted to measurements. No torch.

    seconds = hops · latency + passes · bytes / rate

`plan` estimates communication with this, `bench collectives` shows it next to its measurements, and
`probe` writes it to cluster.yaml. Bytes are those of the whole tensor: a gather's output, a
reduction's input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from drivetrain.cluster.catalogue import LinkEntry

_OVER_A_RING = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "gather": 1.0,
    "scatter": 1.0,
}
_ONCE = ("broadcast", "reduce", "send_recv", "barrier")
PLANNED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that the planner estimates individually."""


def passes(kind: str, num_ranks: int) -> float:
    """Return how often a byte of the whole crosses a rank's link: nccl-tests' busbw / algbw."""
    if kind in _ONCE:
        return 1.0
    return _OVER_A_RING[kind] * (num_ranks - 1) / num_ranks


def hops(kind: str, num_ranks: int) -> float:
    """Return the number of sequential messages; beyond a few nodes libraries use trees."""
    along = min(num_ranks - 1, 4.0 * math.log2(num_ranks))
    return along * (2 if kind == "all_reduce" else 1)


@dataclass(frozen=True)
class ExchangeFit:
    """The fit of one kind of collective on `num_ranks` ranks."""

    kind: str
    num_ranks: int
    bytes_per_s: float
    """Rate through a rank's link that large messages approach (nccl-tests' busbw)."""
    latency_s: float
    """Latency of one hop."""

    def seconds(self, num_bytes: float) -> float:
        sent = passes(self.kind, self.num_ranks) * num_bytes / self.bytes_per_s
        return hops(self.kind, self.num_ranks) * self.latency_s + sent

    def error(self, measured: Mapping[int, float]) -> float:
        """Return the median relative error against measurements."""
        return median(abs(self.seconds(size) / took - 1) for size, took in measured.items())


def fit(kind: str, measured: Mapping[int, float], num_ranks: int) -> ExchangeFit:
    """Fit the rate to the two largest sizes and the latency to the smallest.

    Sizes in between often fit neither line, because libraries switch algorithms there, and most
    communication of a step is in large or in tiny messages.
    """
    small, *_, large = sorted(measured)
    low = sorted(measured)[-2]
    per_byte = max(1e-13, (measured[large] - measured[low]) / (large - low))
    latency = max(0.0, measured[small] - per_byte * small) / hops(kind, num_ranks)
    return ExchangeFit(kind, num_ranks, passes(kind, num_ranks) / per_byte, latency)


def link_entry(
    measured: Mapping[str, Mapping[int, float]], num_ranks: int, source: str
) -> LinkEntry | None:
    """Return a link for a cluster file, fitted to seconds per kind and size.

    None if too little was measured. Each kind is fitted separately, because libraries do not use a
    ring for all of them.
    """
    fits = {
        kind: fit(kind, sizes, num_ranks)
        for kind, sizes in measured.items()
        if kind in PLANNED and len(sizes) > 1
    }
    if "all_reduce" not in fits:
        return None
    all_reduce = fits["all_reduce"]
    return LinkEntry(
        gb_per_s=all_reduce.bytes_per_s / 1e9,
        latency_us=all_reduce.latency_s * 1e6,
        by_kind={kind: (one.bytes_per_s / 1e9, one.latency_s * 1e6) for kind, one in fits.items()},
        source=source,
    )
