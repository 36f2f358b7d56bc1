"""The cost of Horovod: like ddp, but each gradient is one message and is reduced in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.strategies.cost import (
    CostModel,
    Exchange,
    PartNumbers,
    Use,
    Variant,
    reduced_copies,
)
from drivetrain.strategies.horovod import Horovod


class HorovodCost(CostModel):
    """Full copies; fp16 compression halves the bytes sent."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Yield copies of a model that is not itself sharded."""
        if dp > 1 and not is_divided:
            yield Variant(dp, 1, Horovod())

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """Return one all-reduce of all gradients."""
        sent = sum(part.trained for part in parts)
        sent *= 0.5 if use.options.compression == "fp16" else 1.0
        return reduced_copies(sent, use)

    def label(self, use: Use) -> str:
        return "horovod"


COST = HorovodCost()
