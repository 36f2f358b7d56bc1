"""The cost of a parameter server: a full copy to compute with, and a shard of all to serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from drivetrain.strategies.cost import (
    CopiedWalk,
    CostModel,
    Exchange,
    PartNumbers,
    Use,
    Variant,
    Walk,
)
from drivetrain.strategies.parameter_server import ParameterServer


class ParameterServerCost(CostModel):
    """Full copies of the weights, plus shards of the optimizer state and the served weights."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Yield workers with a model that is not itself sharded."""
        if dp > 1 and not is_divided:
            yield Variant(dp, 1, ParameterServer())

    def walk(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        hidden: float,
        use: Use,
    ) -> Walk:
        """Return a walk that includes the server's weights, optimizer state and one gradient."""
        ranks = use.layout.dp
        held = [
            replace(part, optimizer=(part.optimizer + 2 * part.trained) / ranks) for part in parts
        ]
        return CopiedWalk(held, keeps_gradients=use.accumulation > 1)

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """Return pushes to and pulls from all servers: the same bytes as a ring all-reduce."""
        if use.layout.dp_replicate == 1:
            return []
        trained = sum(part.trained for part in parts)
        pulls = 1 / use.options.pull_every
        axes, servers = ("dp_replicate",), float(use.layout.dp_replicate - 1)
        return [
            Exchange("reduce_scatter", axes, trained, calls=servers),
            Exchange("all_gather", axes, trained, calls=servers, times=pulls),
        ]

    def label(self, use: Use) -> str:
        return "parameter_server"

    def num_shards(self, use: Use) -> int:
        """Each server keeps the optimizer state of its weights."""
        return use.layout.dp


COST = ParameterServerCost()
