"""What an exchange between ranks takes, by where they stand: inside a node, or across nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drivetrain.cluster.description import Cluster, Link
from drivetrain.parallel.layout import AXES, Layout
from drivetrain.strategies.cost import PASSES


@dataclass(frozen=True)
class Ring:
    """Ranks that exchange along some axes."""

    num_ranks: int
    link: Link

    def seconds(self, kind: str, num_bytes: float, calls: float = 1.0) -> float:
        """For `calls` exchanges of `num_bytes` together (of the whole, not of a rank's part)."""
        n = self.num_ranks
        if n == 1 or num_bytes <= 0:
            return 0.0
        passes = PASSES[kind] * (n - 1) / n
        rate, latency = self.link.by_kind.get(kind, (self.link.bytes_per_s, self.link.latency_s))
        # beyond a few nodes libraries use trees
        hops = min(n - 1, 4.0 * math.log2(n)) * (2 if kind == "all_reduce" else 1)
        return passes * num_bytes / rate + calls * hops * latency


def ring_along(layout: Layout, cluster: Cluster, *axes: str) -> Ring:
    """The ring of the ranks that differ along `axes` only.

    Ranks are numbered with tp innermost, so inner axes stay inside a node. A ring that crosses
    nodes leaves each of them through as many network ports as it has ranks there.
    """
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    number = math.prod(sizes[axis] for axis in axes)
    stride, inside = 1, 1
    for axis in reversed(AXES):
        if axis in axes:
            room = max(1, cluster.devices_per_node // stride)
            inside *= min(sizes[axis], room) if stride <= cluster.devices_per_node else 1
        stride *= sizes[axis]
    inside = min(inside, number)
    return Ring(number, _slowest(cluster, number, inside))


def neighbours_along(layout: Layout, cluster: Cluster, axis: str) -> Link:
    """The link between two ranks that follow each other along one axis."""
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    stride = math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])
    is_inside = stride * sizes[axis] <= cluster.devices_per_node
    link = cluster.inside if is_inside else cluster.between
    return link or Link(math.inf)


def _slowest(cluster: Cluster, number: int, inside: int) -> Link:
    within = cluster.inside or Link(math.inf)
    if inside >= number or cluster.between is None:
        return within
    between = cluster.between
    # what was measured of single collectives is for rings with one rank on each node
    by_kind = between.by_kind if inside == 1 else {}
    across = Link(between.bytes_per_s * inside, between.latency_s, by_kind)
    return (
        across
        if across.bytes_per_s <= within.bytes_per_s
        else Link(within.bytes_per_s, across.latency_s)
    )
