"""What flat takes: full copies (the default), and one all-reduce that nothing runs beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.strategies.cost import CostModel, Exchange, PartNumbers, Use, Variant
from drivetrain_outside import Flat


class FlatCost(CostModel):
    def variants(
        self, dp: int, cp: int, *, is_divided: bool, shard_sizes: Sequence[int]
    ) -> Iterator[Variant]:
        if dp > 1 and not is_divided:
            yield Variant(dp_replicate=dp, dp_shard=1, options=Flat())

    def exchanges(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], use: Use
    ) -> list[Exchange]:
        half = 0.5 if use.options.wire_dtype == "bf16" else 1.0
        sent = half * sum(part.trained for part in parts)
        return [Exchange("all_reduce", ("dp_replicate",), sent)]

    def label(self, use: Use) -> str:
        return "flat"


COST = FlatCost()
