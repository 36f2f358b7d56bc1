"""Candidate: one way to run a step, with a value for everything that can be chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from drivetrain.core.section import Section
from drivetrain.core.traits import STRATEGIES, traits_of
from drivetrain.parallel.layout import Layout
from drivetrain.plan.profile.model import PrecisionName, Recompute, Way
from drivetrain.strategies.cost import CostModel, Use, cost_model


@dataclass(frozen=True)
class Candidate:
    """Layout + strategy + micro-batch + precision + recompute + offload."""

    layout: Layout
    strategy: str = STRATEGIES.names[0]
    micro_batch_size: int = 1
    accumulation: int = 1
    """Micro-batches per rank and step."""
    precision: PrecisionName = "fp32"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    offload: Literal["none", "cpu"] = "none"
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    options: Section = field(default_factory=Section)
    """The strategy's own config section; by default with its default values."""

    def __post_init__(self) -> None:
        if type(self.options) is Section:
            object.__setattr__(self, "options", traits_of(self.strategy).section())

    @property
    def cost(self) -> CostModel:
        """The cost model of its strategy."""
        return cost_model(self.strategy)

    @property
    def use(self) -> Use:
        """The candidate as input of its cost model."""
        return Use(self.layout, self.options, self.accumulation, self.precision, self.offload)

    @property
    def way(self) -> Way:
        """How a rank computes a step."""
        return Way(
            self.precision,
            weights_cast=self.cost.casts_weights(self.use),
            recompute=self.recompute,
            is_shared=self.layout.tp > 1,
            sequence_parallel=self.sequence_parallel,
            spreads_experts=self.layout.ep > 1,
        )

    @property
    def num_shards(self) -> int:
        """Number of ranks that a copy of weights, gradients and optimizer state is sharded over."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""
        return self.micro_batch_size * self.accumulation * self.layout.dp

    def settings(self) -> dict[str, str | int]:
        """Return the candidate as keys and values of a run's config."""
        layout = self.layout
        said: dict[str, str | int] = {
            "micro_batch_size": self.micro_batch_size,
            "precision.dtype": self.precision,
            "memory.activation_checkpointing": self.recompute,
            "memory.offload": self.offload if self._offloads_by_key else "none",
            "parallel.strategy": self.strategy,
            "parallel.dp_replicate": layout.dp_replicate,
            "parallel.dp_shard": layout.dp_shard,
            "parallel.tp": layout.tp,
            "parallel.pp": layout.pp,
            "parallel.cp": layout.cp,
        }
        if layout.ep > 1:
            said["parallel.ep"] = layout.ep
        if layout.pp > 1:
            said["parallel.pipeline.schedule"] = self.schedule
        if self.sequence_parallel:
            said["parallel.tensor.sequence_parallel"] = "true"
        return {**said, **self.cost.settings(self.use)}

    @property
    def _offloads_by_key(self) -> bool:
        """Whether offload is set by `memory.offload`, or else by keys of the strategy."""
        return "offload" in traits_of(self.strategy).combines_with

    @property
    def title(self) -> str:
        """Short description for tables."""
        layout = self.layout
        is_alone = layout.dp == 1 and layout.cp == 1 and not traits_of(self.strategy).shards
        name = "" if is_alone else self.cost.label(self.use)
        axes = [f"{axis} {size}" for axis, size in _shown_axes(layout).items() if size > 1]
        offload = "offload" if self.offload == "cpu" else ""
        words = [name, " × ".join(axes), offload, self.cost.remark(self.use)]
        return " ".join(word for word in words if word) or "one device"


def _shown_axes(layout: Layout) -> dict[str, int]:
    return {
        "pp": layout.pp,
        "replicate": layout.dp_replicate,
        "shard": layout.dp_shard,
        "ep": layout.ep,
        "cp": layout.cp,
        "tp": layout.tp,
    }
