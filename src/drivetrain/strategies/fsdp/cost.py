"""What fsdp takes: shards at rest, whole weights while a block is at work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from drivetrain.core.section import Section
from drivetrain.strategies.cost import (
    CopiedWalk,
    CostModel,
    Exchange,
    Memory,
    PartNumbers,
    Use,
    Variant,
    Walk,
    reduced_copies,
)
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.walk import Between, ShardedWalk


class FSDPCost(CostModel):
    """FSDP2: weights are gathered block by block, forward and back, and gradients reduced."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Copies of shards, by how many ranks a copy is over."""
        if dp * cp > 1:
            for shard in shard_sizes:
                yield Variant(dp // shard, shard, FSDP())

    def walk(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float, use: Use
    ) -> Walk:
        """FSDP2's, or that of one rank."""
        accumulates = use.accumulation > 1
        if use.num_shards == 1:
            return CopiedWalk(parts, keeps_gradients=accumulates or use.layout.dp > 1)
        between: Between = "whole" if _accumulates_whole(use) else "shards"
        if not accumulates:
            between = "none"
        ratio = _compute_ratio(use)
        return ShardedWalk(parts, is_root, use.num_shards, ratio, hidden, between=between)

    def exchanges(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], use: Use
    ) -> list[Exchange]:
        """Weights, for each micro-batch; gradients; and what copies of the shards add up."""
        trained = sum(part.trained for part in parts)
        if use.num_shards == 1:
            return reduced_copies(trained, use)
        whole = [part.parameters for part in parts]
        # the root stays whole from its forward to the end of backward; a block can be told to
        keeps = use.options.reshard_after_forward is False
        again = [size for size, root in zip(whole, is_root, strict=True) if not root and not keeps]
        reductions = use.accumulation if use.options.reduce_every_micro_batch else 1
        return [
            *sharded_exchanges(sum(whole), sum(again), trained, len(parts), reductions, use),
            *reduced_copies(trained / use.num_shards, use),
        ]

    def label(self, use: Use) -> str:
        """HSDP, where there are copies of shards."""
        return "hsdp" if use.layout.dp_replicate > 1 and use.num_shards > 1 else "fsdp"

    def remark(self, use: Use) -> str:
        """Where gradients are reduced more often than once a step."""
        return "reduce each" if use.options.reduce_every_micro_batch else ""

    def settings(self, use: Use) -> dict[str, str | int]:
        """Where gradients are reduced more often than once a step."""
        if not use.options.reduce_every_micro_batch:
            return {}
        return {"parallel.fsdp.reduce_every_micro_batch": "true"}

    def complexity(self, use: Use) -> float:
        """One more than copies."""
        return 1.1 if use.options.reduce_every_micro_batch else 1.0

    def leaner(self, use: Use) -> Section | None:
        """Gradients reduced in every micro-batch, where they would lie whole in between."""
        options: FSDP = use.options
        leaner = options.model_copy(update={"reduce_every_micro_batch": True})
        return leaner if _accumulates_whole(use) else None

    def casts_weights(self, use: Use) -> bool:
        """FSDP2 gathers them in the compute precision."""
        return use.num_shards > 1 and use.precision != "fp32"

    def num_shards(self, use: Use) -> int:
        """All of it."""
        return use.num_shards

    def can_offload(self, use: Use) -> bool:
        """Shards of a model that is not itself cut."""
        return use.num_shards > 1 and not use.is_divided

    def on_device(self, memory: Memory, use: Use) -> Memory:
        """Whole gradients of earlier micro-batches stay where they were made."""
        if use.offload == "none":
            return memory
        gradients = memory.gradients if _accumulates_whole(use) else 0.0
        return replace(memory, parameters=0.0, optimizer=0.0, gradients=gradients)

    def least_state(self, weights: float, trained: float, state: float, use: Use) -> float:
        """All in shards, or in the host's memory."""
        if use.offload == "cpu":
            return 0.0
        shards = use.num_shards
        return weights / shards + trained / shards + state / shards


def sharded_exchanges(
    whole: float, again: float, trained: float, num_parts: int, reductions: float, use: Use
) -> list[Exchange]:
    """Weights gathered in forward (`whole` bytes) and back (`again`); gradients to shards."""
    axes = ("dp_shard", "cp") if use.layout.cp > 1 else ("dp_shard",)
    ratio = _compute_ratio(use)
    blocks, turns = max(1, num_parts - 1), use.accumulation  # what is in no block is one unit
    forward = Exchange(
        "all_gather",
        axes,
        whole * ratio,
        blocks,
        times=turns,
        beside="forward",
        turns=turns,
        pieces=blocks,
        units=turns * blocks,
    )
    back = replace(forward, num_bytes=again * ratio, beside="backward", units=0.0)
    scatter = replace(back, kind="reduce_scatter", num_bytes=trained, times=reductions)
    return [forward, back, scatter]


def _accumulates_whole(use: Use) -> bool:
    """Whether unsharded gradients are kept from micro-batch to micro-batch."""
    every = use.options.reduce_every_micro_batch
    return use.num_shards > 1 and use.accumulation > 1 and not every


def _compute_ratio(use: Use) -> float:
    return 1.0 if use.precision == "fp32" else 0.5


COST = FSDPCost()
