"""The cost of fsdp: shards at rest, gathered weights while a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from drivetrain.core.section import Section
from drivetrain.parallel.layout import Layout
from drivetrain.strategies.cost import (
    CopiedWalk,
    CostModel,
    Exchange,
    Held,
    Memory,
    Moment,
    PartNumbers,
    Use,
    Variant,
    Walk,
    reduced_copies,
)
from drivetrain.strategies.fsdp import FSDP

# FSDP2's memory through a step: shards at rest, gathered weights while a block runs.
#
# What torch's `fully_shard` needs, in bytes: `U` a part's weights in the compute precision, `R` its
# gradients in the precision they are reduced in, `r` the root (everything that is in no block),
# whose weights stay gathered from its forward to the end of backward.
#
#     forward, block i     U_r + 2·U_i      gathered weights, and the buffer they were copied from
#     backward, block i    U_r + U_i + U_(i-1) + R_(i+1)    the next gather is in flight, and the
#                                           previous reduction's input is still held
#     end of block i       U_r + U_(i-1) + gradients of i + R_i + R_i/n + a hidden state in flight

Between = Literal["none", "shards", "whole"]
"""Which gradients exist when a micro-batch starts."""


class ShardedWalk(Walk):
    """The memory of one rank's stage with weights in `num_shards` shards."""

    def __init__(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        num_shards: int,
        compute_ratio: float,
        hidden: float,
        *,
        between: Between,
        use: Use | None = None,
    ) -> None:
        self._use = use or Use(Layout(), None)
        self._parts = parts
        self._shards = num_shards
        self._ratio = compute_ratio
        self._hidden = hidden
        self._between = between
        self._is_root = is_root
        self._root = sum(
            self._use.whole(p) * compute_ratio
            for p, root in zip(parts, is_root, strict=True)
            if root
        )
        self._root_trained = sum(
            self._use.whole_trained(p) for p, root in zip(parts, is_root, strict=True) if root
        )

    def held(self) -> Held:
        """Return the shards, and full buffers."""
        parts, shards = self._parts, self._shards
        return Held(
            sum(part.parameters for part in parts) / shards,
            sum(part.optimizer for part in parts) / shards,
            sum(part.buffers for part in parts),
        )

    def gradient_shards(self) -> float:
        """Return the bytes of this rank's gradients after reduction."""
        return sum(part.trained for part in self._parts) / self._shards

    def forward(self) -> list[Moment]:
        """Return the moments of forward; each block's weights are gathered while it runs."""
        points: list[Moment] = []
        saved = 0.0
        waiting = self._accumulated(len(self._parts)) + self._earlier_shards()
        for index, part in enumerate(self._parts):
            # the previous gather's buffer is freed when this gather is complete
            earlier = self._root if index == 1 and self._is_root[0] else self._whole(index - 1)
            own = self._root if index == 0 and self._is_root[0] else 2 * self._whole(index)
            gathered = self._root + max(own, earlier + self._whole(index))
            points.append(Moment("forward", saved + part.forward.peak, waiting, gathered))
            saved += part.saved
        return points

    def backward(self) -> list[Moment]:
        """Return the moments of backward; a block's gradients are reduced after its backward."""
        points: list[Moment] = []
        saved = sum(part.saved for part in self._parts)
        last = len(self._parts) - 1
        root_gradients, shards_made, held_input = 0.0, self._earlier_shards(), 0.0
        for index in range(last, -1, -1):
            part, work = self._parts[index], self._parts[index].backward
            saved -= part.saved
            own = work.peak_with_gradients - work.peak
            before = self._whole(index - 1)
            gradients = root_gradients + shards_made + self._accumulated(index + 1)
            gathered = self._root + self._whole(index) + held_input
            if self._is_root[index]:
                # the next gather starts after the backward of the loss
                points.append(Moment("backward", saved + work.peak, gradients + own, gathered))
                end = saved + max(work.end, 0.0) + self._hidden
                points.append(
                    Moment("backward", end, gradients + work.gradients, gathered + before)
                )
                root_gradients += work.gradients
                continue
            points.append(Moment("backward", saved + work.peak, gradients + own, gathered + before))
            reduced = self._use.whole_trained(part)
            points.append(
                Moment(
                    "backward",
                    saved + work.end + self._hidden,
                    gradients + work.gradients,
                    self._root + before + reduced * (1 + 1 / self._shards),
                )
            )
            if self._between != "shards":  # otherwise it is added to the existing shard
                shards_made += part.trained / self._shards
            held_input = reduced
        # the root's gathered weights are freed before its gradients are reduced
        end = self._root_trained * (1 + 1 / self._shards)
        points.append(Moment("backward", 0.0, root_gradients + shards_made, end))
        return points

    def optimizer(self, extra: float) -> Moment:
        return Moment("optimizer", extra, self.gradient_shards())

    def _whole(self, index: int) -> float:
        """Return the bytes of a block's gathered weights; the root is counted separately."""
        if not 0 <= index < len(self._parts) or self._is_root[index]:
            return 0.0
        return self._use.whole(self._parts[index]) * self._ratio

    def _earlier_shards(self) -> float:
        return self.gradient_shards() if self._between == "shards" else 0.0

    def _accumulated(self, upto: int) -> float:
        """Return the bytes of earlier micro-batches' full gradients of parts not yet reduced."""
        if self._between != "whole":
            return 0.0
        root = self._root_trained
        blocks = sum(
            self._use.whole_trained(part)
            for index, part in enumerate(self._parts[:upto])
            if not self._is_root[index]
        )
        return root + blocks


class FSDPCost(CostModel):
    """FSDP2: weights are gathered block by block in forward and backward; gradients are reduced."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Yield the splits into copies and shards, for each number of shards."""
        if dp * cp > 1:
            for shard in shard_sizes:
                yield Variant(dp // shard, shard, FSDP())

    def walk(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float, use: Use
    ) -> Walk:
        """Return FSDP2's walk, or that of a full copy if there is only one shard."""
        accumulates = use.accumulation > 1
        if use.num_shards == 1:
            return CopiedWalk(parts, keeps_gradients=accumulates or use.layout.dp > 1)
        between: Between = "whole" if _accumulates_whole(use) else "shards"
        if not accumulates:
            between = "none"
        ratio = _compute_ratio(use)
        return ShardedWalk(parts, is_root, use.num_shards, ratio, hidden, between=between, use=use)

    def exchanges(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], use: Use
    ) -> list[Exchange]:
        """Return gathers per micro-batch, gradient reductions, and all-reduces between copies."""
        trained = sum(part.trained for part in parts)
        if use.num_shards == 1:
            return reduced_copies(trained, use)
        whole = [part.parameters - (part.experts if _spreads(use) else 0.0) for part in parts]
        # the root stays gathered from its forward to the end of backward; blocks optionally
        keeps = use.options.reshard_after_forward is False
        again = [size for size, root in zip(whole, is_root, strict=True) if not root and not keeps]
        reductions = use.accumulation if use.options.reduce_every_micro_batch else 1
        spread = sum(part.trained_experts for part in parts) if _spreads(use) else 0.0
        sent = sharded_exchanges(
            sum(whole), sum(again), trained - spread, len(parts), reductions, use
        )
        return [
            *sent,
            *(_of_experts(parts, sent, use, gathers_again=not keeps) if _spreads(use) else ()),
            *reduced_copies(trained / use.num_shards, use),
        ]

    def label(self, use: Use) -> str:
        """Return "hsdp" if there are copies of shards, else "fsdp"."""
        return "hsdp" if use.layout.dp_replicate > 1 and use.num_shards > 1 else "fsdp"

    def remark(self, use: Use) -> str:
        """Return "reduce each" if gradients are reduced in every micro-batch."""
        return "reduce each" if use.options.reduce_every_micro_batch else ""

    def settings(self, use: Use) -> dict[str, str | int]:
        if not use.options.reduce_every_micro_batch:
            return {}
        return {"parallel.fsdp.reduce_every_micro_batch": "true"}

    def complexity(self, use: Use) -> float:
        """Return 1, or slightly more if gradients are reduced in every micro-batch."""
        return 1.1 if use.options.reduce_every_micro_batch else 1.0

    def leaner(self, use: Use) -> Section | None:
        """Return options that reduce in every micro-batch, if full gradients would be kept."""
        options: FSDP = use.options
        leaner = options.model_copy(update={"reduce_every_micro_batch": True})
        return leaner if _accumulates_whole(use) else None

    def casts_weights(self, use: Use) -> bool:
        """FSDP2 gathers weights in the compute precision."""
        return use.num_shards > 1 and use.precision != "fp32"

    def num_shards(self, use: Use) -> int:
        return use.num_shards

    def can_offload(self, use: Use) -> bool:
        return use.num_shards > 1 and not use.is_divided

    def on_device(self, memory: Memory, use: Use) -> Memory:
        """Return what is left on the device: full gradients of earlier micro-batches stay there."""
        if use.offload == "none":
            return memory
        gradients = memory.gradients if _accumulates_whole(use) else 0.0
        return replace(memory, parameters=0.0, optimizer=0.0, gradients=gradients)

    def least_state(self, weights: float, trained: float, state: float, use: Use) -> float:
        if use.offload == "cpu":
            return 0.0
        shards = use.num_shards
        return weights / shards + trained / shards + state / shards


def sharded_exchanges(
    whole: float, again: float, trained: float, num_parts: int, reductions: float, use: Use
) -> list[Exchange]:
    """Return gathers in forward (`whole` bytes) and backward (`again`), and the reduce-scatter."""
    axes = ("dp_shard", "cp") if use.layout.cp > 1 else ("dp_shard",)
    ratio = _compute_ratio(use)
    blocks, turns = max(1, num_parts - 1), use.accumulation  # all that is in no block is one unit
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


def _spreads(use: Use) -> bool:
    return use.layout.ep > 1


def _of_experts(
    parts: Sequence[PartNumbers], sent: Sequence[Exchange], use: Use, *, gathers_again: bool
) -> list[Exchange]:
    """Return the same for experts, between ranks that have the same ones; without tokens."""
    if use.layout.expert_shard == 1:
        return []
    weights = sum(part.experts for part in parts) / use.layout.ep * _compute_ratio(use)
    trained = sum(part.trained_experts for part in parts) / use.layout.ep
    sizes = (weights, weights if gathers_again else 0.0, trained)
    return [
        replace(each, axes=("expert_shard",), num_bytes=size)
        for each, size in zip(sent, sizes, strict=True)
    ]


def _accumulates_whole(use: Use) -> bool:
    """Whether unsharded gradients are kept between micro-batches."""
    every = use.options.reduce_every_micro_batch
    return use.num_shards > 1 and use.accumulation > 1 and not every


def _compute_ratio(use: Use) -> float:
    return 1.0 if use.precision == "fp32" else 0.5


COST = FSDPCost()
