"""What ddp takes: everything in full on each rank, and gradients in buckets beside backward."""

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
    """DDP's buckets: gradients live in them from the first step on."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Copies of a model that is not itself cut, or one model that is."""
        if cp == 1 and (dp == 1 or not is_divided):
            yield Variant(dp, 1, DDP())

    def walk(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        hidden: float,
        use: Use,
    ) -> Walk:
        """Copies, and the buckets."""
        return copies_with_buckets(parts, use)

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """One all-reduce of all gradients."""
        return reduced_copies(sum(part.trained for part in parts), use)

    def label(self, use: Use) -> str:
        return "ddp"

    def complexity(self, use: Use) -> float:
        """The simplest."""
        return 0.0


COST = DDPCost()
