"""What a collective takes by size: a latency and a rate, fitted to what was measured. No torch.

    seconds = hops · latency + passes · bytes / rate

`plan` prices an exchange with this, `bench collectives` shows it beside its rows, and `probe`
writes it into cluster.yaml. Bytes are of the whole: what a gather gives, what a reduction is given.
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
"""Kinds that the planner prices by themselves."""


def passes(kind: str, num_ranks: int) -> float:
    """How often a byte of the whole crosses a rank's link: nccl-tests' busbw over its algbw."""
    if kind in _ONCE:
        return 1.0
    return _OVER_A_RING[kind] * (num_ranks - 1) / num_ranks


def hops(kind: str, num_ranks: int) -> float:
    """Messages one after another; beyond a few nodes libraries use trees."""
    along = min(num_ranks - 1, 4.0 * math.log2(num_ranks))
    return along * (2 if kind == "all_reduce" else 1)


@dataclass(frozen=True)
class ExchangeFit:
    """One kind of collective on so many ranks."""

    kind: str
    num_ranks: int
    bytes_per_s: float
    """Through a rank's link, in large messages: the busbw that is approached."""
    latency_s: float
    """Of one hop."""

    def seconds(self, num_bytes: float) -> float:
        sent = passes(self.kind, self.num_ranks) * num_bytes / self.bytes_per_s
        return hops(self.kind, self.num_ranks) * self.latency_s + sent

    def error(self, measured: Mapping[int, float]) -> float:
        """The median distance to what was measured, as a part of it."""
        return median(abs(self.seconds(size) / took - 1) for size, took in measured.items())


def fit(kind: str, measured: Mapping[int, float], num_ranks: int) -> ExchangeFit:
    """The rate by the two largest sizes, the latency by the smallest.

    What lies between them is often on neither line (libraries change their ways there), and large
    messages and empty ones are what most of a step's exchanges are.
    """
    small, *_, large = sorted(measured)
    low = sorted(measured)[-2]
    per_byte = max(1e-13, (measured[large] - measured[low]) / (large - low))
    latency = max(0.0, measured[small] - per_byte * small) / hops(kind, num_ranks)
    return ExchangeFit(kind, num_ranks, passes(kind, num_ranks) / per_byte, latency)


def link_entry(
    measured: Mapping[str, Mapping[int, float]], num_ranks: int, source: str
) -> LinkEntry | None:
    """A link for a cluster file, by seconds per kind and size; None when too little was measured.

    Each kind by itself: libraries do some of them in other ways than as a ring.
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
