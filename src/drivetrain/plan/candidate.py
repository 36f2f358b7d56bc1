"""Candidate: one way to run a step, everything that is to be chosen said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drivetrain.parallel.layout import Layout
from drivetrain.plan.profile.model import PrecisionName, Recompute, Way

StrategyName = Literal["ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True)
class Candidate:
    """Layout + strategy + micro-batch + precision + recompute + offload."""

    layout: Layout
    strategy: StrategyName = "ddp"
    micro_batch_size: int = 1
    accumulation: int = 1
    """Micro-batches per rank and step."""
    precision: PrecisionName = "fp32"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    offload: Literal["none", "cpu"] = "none"
    zero_stage: Literal[1, 2, 3] | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    reduce_every_micro_batch: bool = False
    """fsdp: gradients in shards between micro-batches, not whole."""

    @property
    def way(self) -> Way:
        """How a rank computes."""
        is_sharded = self.strategy == "fsdp" and self.num_shards > 1
        return Way(
            self.precision,
            weights_cast=is_sharded and self.precision != "fp32",
            recompute=self.recompute,
            is_shared=self.layout.tp > 1,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def num_shards(self) -> int:
        """Ranks that weights, gradients and optimizer state are in shards over."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def accumulates_whole(self) -> bool:
        """Whether fsdp keeps unsharded gradients from micro-batch to micro-batch."""
        is_sharded = self.strategy == "fsdp" and self.num_shards > 1
        return is_sharded and self.accumulation > 1 and not self.reduce_every_micro_batch

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        return self.micro_batch_size * self.accumulation * self.layout.dp

    def settings(self) -> dict[str, str | int]:
        """As keys of a run's config."""
        layout = self.layout
        said: dict[str, str | int] = {
            "micro_batch_size": self.micro_batch_size,
            "precision.dtype": self.precision,
            "memory.activation_checkpointing": self.recompute,
            "memory.offload": "none" if self.strategy == "deepspeed" else self.offload,
            "parallel.strategy": self.strategy,
            "parallel.dp_replicate": layout.dp_replicate,
            "parallel.dp_shard": layout.dp_shard,
            "parallel.tp": layout.tp,
            "parallel.pp": layout.pp,
            "parallel.cp": layout.cp,
        }
        if layout.pp > 1:
            said["parallel.pipeline.schedule"] = self.schedule
        if self.reduce_every_micro_batch:
            said["parallel.fsdp.reduce_every_micro_batch"] = "true"
        if self.sequence_parallel:
            said["parallel.tensor.sequence_parallel"] = "true"
        if self.zero_stage is not None:
            said["parallel.deepspeed.zero_stage"] = self.zero_stage
            if self.offload == "cpu":
                said["parallel.deepspeed.offload_optimizer"] = "cpu"
        return said

    @property
    def title(self) -> str:
        """Short, for a table."""
        name = self.strategy if self.zero_stage is None else f"zero-{self.zero_stage}"
        layout = self.layout
        if self.strategy == "fsdp" and layout.dp_replicate > 1 and self.num_shards > 1:
            name = "hsdp"
        if layout.dp == 1 and layout.cp == 1 and name == "ddp":
            name = ""
        axes = [f"{axis} {size}" for axis, size in _shown_axes(layout).items() if size > 1]
        words = [name, " × ".join(axes), "offload" if self.offload == "cpu" else ""]
        if self.reduce_every_micro_batch:
            words.append("reduce each")
        return " ".join(word for word in words if word) or "one device"


def _shown_axes(layout: Layout) -> dict[str, int]:
    return {
        "pp": layout.pp,
        "replicate": layout.dp_replicate,
        "shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
    }
