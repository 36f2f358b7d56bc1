"""The cost of ddp: full copies on each rank; gradients are reduced in buckets during backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.strategies.cost import (
    CostModel,
    Exchange,
    PartNumbers,
    Use,
    Variant,
    Walk,
    copies_with_buckets,
    reduced_copies,
)
from drivetrain.strategies.ddp import DDP


class DDPCost(CostModel):
    """Full copies whose gradients are in DDP's buckets from the first step on."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Yield copies of a model that is not itself sharded, or a single sharded model."""
        if cp == 1 and (dp == 1 or not is_divided):
            yield Variant(dp, 1, DDP())

    def walk(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        hidden: float,
        use: Use,
    ) -> Walk:
        return copies_with_buckets(parts, use)

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """Return one all-reduce of all gradients."""
        return reduced_copies(sum(part.trained for part in parts), use)

    def label(self, use: Use) -> str:
        return "ddp"

    def complexity(self, use: Use) -> float:
        return 0.0


COST = DDPCost()
