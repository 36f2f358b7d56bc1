"""The request that the client sends to the ranks, and the results. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain.cluster.exchange import ExchangeFit, fit, passes

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)
SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""A rank has one part of n: nccl-tests' count is per part, its size is of the whole."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
TYPES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
    "bfloat16": 2,
}
"""Bytes per element, by nccl-tests' names."""
REDUCTIONS = ("sum", "min", "max")
PLACEMENTS = ("out_of_place", "in_place")
_ALIGNED_BYTES = 16
"""nccl-tests rounds a part down to a multiple of this."""


@dataclass(frozen=True)
class CollectivesRequest:
    """What to measure, and where to write the results."""

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = ()
    """Total sizes in bytes."""
    dtype: str = "float"
    redop: str = "sum"
    axes: Mapping[str, int] = field(default_factory=dict)
    """Axis sizes of a layout; each axis with more than one rank gets its own rows."""
    calls: int | None = None
    """Timed calls per row; None: as many as fit in a quarter of a second, 5 to 200."""
    warmup: int = 2
    is_thorough: bool = True
    """Check results, and measure in place as well if torch's call has both forms."""
    comm_backend: str | None = None
    """None: the device's default."""
    line_rate_bytes_per_s: float | None = None
    """Of a node's link to other nodes; on one node, of a rank's link."""
    json_file: str | None = None
    plot_file: str | None = None
    cluster_file: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CollectivesRequest:
        given = json.loads(text)
        given |= {key: tuple(given[key]) for key in ("operations", "sizes")}
        return cls(**given)


def sizes_from(least: int, most: int, factor: int) -> tuple[int, ...]:
    """Return sizes from `least` to `most`, each `factor` times the previous one."""
    found = []
    while least <= most:
        found.append(least)
        least *= factor
    return tuple(found)


def element_count(operation: str, num_bytes: int, dtype: str, num_ranks: int) -> int:
    """Return nccl-tests' `count` for a size; 0 if it is too small to split into parts."""
    if operation == "barrier":
        return 0
    element_bytes = TYPES[dtype]
    count = num_bytes // element_bytes
    if operation not in SHARED:
        return count
    step = _ALIGNED_BYTES // element_bytes
    return count // num_ranks // step * step


@dataclass(frozen=True)
class CallTimes:
    """Times of one placement of one row, over `calls` calls on every rank."""

    time_s: float
    """Mean over calls and ranks, as in nccl-tests."""
    p50_s: float
    p99_s: float
    """Percentiles over calls, each by its slowest rank."""
    slowest_rank: int
    slowest_s: float
    """The rank with the largest mean, and that mean."""
    calls: int
    wrong: int | None
    """Wrong elements over all ranks; None: nothing to check."""


@dataclass(frozen=True)
class Row:
    """One operation at one size on one set of groups."""

    operation: str
    count: int
    dtype: str
    redop: str
    root: int
    num_ranks: int
    out_of_place: CallTimes | None
    """None: torch's call has no such form."""
    in_place: CallTimes | None

    @property
    def num_bytes(self) -> int:
        """nccl-tests' `size`: of the larger of input and output."""
        whole = self.num_ranks if self.operation in SHARED else 1
        return self.count * TYPES[self.dtype] * whole

    @property
    def timed(self) -> CallTimes:
        """The measured placement; of two, out of place."""
        found = self.out_of_place or self.in_place
        assert found is not None, "a row is of at least one placement"  # noqa: S101 - by how it is made
        return found

    @property
    def wrong(self) -> int:
        return sum(each.wrong or 0 for each in (self.out_of_place, self.in_place) if each)

    def algbw(self, times: CallTimes) -> float:
        """Return bytes per second of the whole."""
        return self.num_bytes / times.time_s

    def busbw(self, times: CallTimes) -> float:
        """Return bytes per second through a rank's link if the ranks formed a ring."""
        return self.algbw(times) * passes(self.operation, self.num_ranks)

    def to_dict(self) -> dict[str, Any]:
        found = {**asdict(self), "size": self.num_bytes}
        for placement in PLACEMENTS:
            times: CallTimes | None = getattr(self, placement)
            if times is not None:
                found[placement] |= {
                    "algbw_gb_per_s": self.algbw(times) / 1e9,
                    "busbw_gb_per_s": self.busbw(times) / 1e9,
                }
        return found


@dataclass(frozen=True)
class RankSet:
    """Groups of ranks that communicate at the same time; each rank is in one of them."""

    name: str
    """`world`, `inside a node`, `between nodes`, or an axis."""
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks per group."""
        return len(self.groups[0])

    def rings_per_link(self, node_of: Sequence[int]) -> int:
        """Return how many groups share a node's link; 0 if no group leaves its node."""
        nodes_of = [{node_of[rank] for rank in group} for group in self.groups]
        return max(
            sum(node in nodes and len(nodes) > 1 for nodes in nodes_of) for node in set(node_of)
        )


def rank_sets(
    node_of: Sequence[int], axes: Mapping[str, Sequence[tuple[int, ...]]]
) -> list[RankSet]:
    """Return the sets: all ranks; inside and between nodes if there are several; each axis."""
    members = [[r for r, n in enumerate(node_of) if n == node] for node in sorted(set(node_of))]
    sets = [RankSet("world", (tuple(range(len(node_of))),))]
    even = len({len(each) for each in members}) == 1
    if len(members) > 1 and even and len(members[0]) > 1:
        sets.append(RankSet("inside a node", tuple(map(tuple, members))))
        sets.append(RankSet("between nodes", tuple(zip(*members, strict=True))))
    sets += [RankSet(f"axis {axis}", tuple(groups)) for axis, groups in axes.items()]
    return sets


@dataclass(frozen=True)
class Measured:
    """The rows of one set of groups."""

    ranks: RankSet
    rows: tuple[Row, ...]

    def seconds(self) -> dict[str, dict[int, float]]:
        """Return the median call by operation and size, to which the model is fitted."""
        found: dict[str, dict[int, float]] = {}
        for row in self.rows:
            if row.num_bytes:
                found.setdefault(row.operation, {})[row.num_bytes] = row.timed.p50_s
        return found

    def fits(self) -> list[ExchangeFit]:
        """Return fits of operations with enough sizes to separate latency from rate."""
        number = self.ranks.num_ranks
        return [fit(k, sizes, number) for k, sizes in self.seconds().items() if len(sizes) > 2]


def exchange_of(sets: Sequence[Measured], num_nodes: int) -> dict[str, Any]:
    """Return the input for a cluster file: seconds inside a node and between nodes."""
    named = {each.ranks.name: each for each in sets}
    where = {"inside": named.get("inside a node"), "between": named.get("between nodes")}
    if where["inside"] is None:  # all ranks in one node, or one in each
        where = {"inside" if num_nodes == 1 else "between": named.get("world")}
    return {
        place: {"ranks": each.ranks.num_ranks, "seconds": each.seconds()}
        for place, each in where.items()
        if each is not None
    }
