"""The cost of local SGD: ddp's plus anchor and momentum; weights are sent every `inner_steps`."""

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
    reduced_copies,
)
from drivetrain.strategies.local_sgd import LocalSGD


class LocalSGDCost(CostModel):
    """Full copies, plus the state needed to synchronize them."""

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
            yield Variant(dp, 1, LocalSGD())

    def walk(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        hidden: float,
        use: Use,
    ) -> Walk:
        """Return a walk with the anchor and, for DiLoCo, its momentum in the optimizer state."""
        kept = 2 if use.options.outer == "diloco" else 1
        held = [replace(part, optimizer=part.optimizer + kept * part.trained) for part in parts]
        return CopiedWalk(held, keeps_gradients=use.accumulation > 1)

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """Return the all-reduce of the weight change, in one piece and without overlap."""
        halves = 0.5 if use.options.outer_dtype == "bf16" else 1.0
        sent = halves * sum(part.trained for part in parts)
        each = reduced_copies(sent, use, times=1 / use.options.inner_steps)
        return [replace(exchange, beside="nothing", calls=1.0) for exchange in each]

    def label(self, use: Use) -> str:
        return "local_sgd"


COST = LocalSGDCost()
