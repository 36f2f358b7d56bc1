"""The cost of DeepSpeed's ZeRO by stage. Coarser than fsdp's: DeepSpeed is not traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from drivetrain.strategies.cost import (
    CostModel,
    Exchange,
    Held,
    Memory,
    Moment,
    PartNumbers,
    Use,
    Variant,
    Walk,
    copies_with_buckets,
)
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.fsdp.cost import Between, ShardedWalk, sharded_exchanges

# DeepSpeed's default bucket for reducing gradients and gathering weights: 5e8 elements, at most as
# many as there are
_BUCKET_BYTES = 2e9


class ZeroWalk(Walk):
    """Another walk plus ZeRO's state: the optimizer steps on a second copy of its shard."""

    def __init__(
        self, under: Walk, parts: Sequence[PartNumbers], num_shards: int, stage: int
    ) -> None:
        self._under = under
        self._stage = stage
        trained = sum(part.trained for part in parts)
        self._bucket = min(_BUCKET_BYTES, trained)
        self._state = (sum(part.optimizer for part in parts) + trained) / num_shards
        self._gradients = trained / (num_shards if stage == 2 else 1)
        self._saved = sum(part.saved for part in parts)

    def held(self) -> Held:
        """Return the underlying walk's, with sharded optimizer state at every stage."""
        return replace(self._under.held(), optimizer=self._state)

    def forward(self) -> list[Moment]:
        """Return the gathers of stage 3; below it, `optimizer` returns the step's worst moment."""
        return self._beside_bucket(self._under.forward()) if self._stage == 3 else []

    def backward(self) -> list[Moment]:
        return self._beside_bucket(self._under.backward()) if self._stage == 3 else []

    def optimizer(self, extra: float) -> Moment:
        """Return, below stage 3, the worst moment under full copies, with ZeRO's gradients."""
        under = self._under
        if self._stage == 3:
            return self._beside_bucket([under.optimizer(extra)])[0]
        moments = [*under.forward(), *under.backward(), under.optimizer(extra)]
        worst = max(moments, key=lambda m: m.activations + m.gradients + m.gathered)
        in_hand = worst.activations if worst.name != "optimizer" else 0.0
        return Moment(worst.name, max(in_hand, self._saved), self._gradients, self._bucket)

    def _beside_bucket(self, moments: list[Moment]) -> list[Moment]:
        half = self._bucket / 2
        return [replace(moment, gathered=moment.gathered + half) for moment in moments]


class DeepSpeedCost(CostModel):
    """Stage 1: sharded optimizer state; 2: gradients too; 3: weights too."""

    def variants(
        self,
        dp: int,
        cp: int,
        *,
        is_divided: bool,
        shard_sizes: Sequence[int],
    ) -> Iterator[Variant]:
        """Yield the three stages, over all ranks."""
        stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
        if dp * cp > 1 and not is_divided:
            for stage in stages:
                yield Variant(1, dp, DeepSpeed(zero_stage=stage))

    def walk(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float, use: Use
    ) -> Walk:
        """Return fsdp's walk that reduces every micro-batch (stage 3), or ddp's."""
        stage, shards = _stage(use), use.layout.dp_shard
        if stage == 3 and use.num_shards > 1:
            between: Between = "shards" if use.accumulation > 1 else "none"
            ratio = 1.0 if use.precision == "fp32" else 0.5
            under: Walk = ShardedWalk(
                parts, is_root, use.num_shards, ratio, hidden, between=between
            )
            return ZeroWalk(under, parts, shards, stage)
        return ZeroWalk(copies_with_buckets(parts, use), parts, shards, stage)

    def exchanges(
        self,
        parts: Sequence[PartNumbers],
        is_root: Sequence[bool],
        use: Use,
    ) -> list[Exchange]:
        """Return stage 1's all-reduce per step, 2's per micro-batch, or 3's reduce-scatter."""
        if use.layout.dp_shard == 1:
            return []
        trained = sum(part.trained for part in parts)
        whole = sum(part.parameters for part in parts)
        turns, stage = use.accumulation, _stage(use)
        if stage == 3:
            return sharded_exchanges(whole, whole, trained, len(parts), turns, use)
        reductions = turns if stage == 2 else 1
        blocks = max(1, len(parts) - 1)
        reduce = Exchange(
            "all_reduce",
            ("dp_shard",),
            trained * reductions,
            blocks * reductions,
            beside="backward",
            turns=reductions,
        )
        # after the step, without overlap
        return [reduce, Exchange("all_gather", ("dp_shard",), whole, blocks)]

    def label(self, use: Use) -> str:
        return f"zero-{_stage(use)}"

    def settings(self, use: Use) -> dict[str, str | int]:
        """Return the stage, and offload under DeepSpeed's own key."""
        said: dict[str, str | int] = {"parallel.deepspeed.zero_stage": _stage(use)}
        if use.offload == "cpu":
            said["parallel.deepspeed.offload_optimizer"] = "cpu"
        return said

    def complexity(self, use: Use) -> float:
        """Return more than for torch's strategies, because another engine is involved."""
        return 2.0

    def num_shards(self, use: Use) -> int:
        """Optimizer state is sharded at every stage."""
        return use.num_shards

    def step_shards(self, use: Use) -> int:
        """The optimizer's temporary memory is counted in full below stage 3."""
        return use.num_shards if _stage(use) == 3 else 1

    def can_offload(self, use: Use) -> bool:
        return use.num_shards > 1 and not use.is_divided

    def on_device(self, memory: Memory, use: Use) -> Memory:
        """Return the memory without the optimizer state, which is what is offloaded."""
        return memory if use.offload == "none" else replace(memory, optimizer=0.0)

    def least_state(self, weights: float, trained: float, state: float, use: Use) -> float:
        stage, shards = _stage(use), use.num_shards
        return (
            weights / (shards if stage == 3 else 1)
            + trained / (shards if stage >= 2 else 1)
            + (0.0 if use.offload == "cpu" else state / shards)
        )


def _stage(use: Use) -> int:
    return use.options.zero_stage or 2


COST = DeepSpeedCost()
