"""deepspeed: ZeRO's three stages, and offload to host memory or a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.errors import Problem
from drivetrain.core.section import Section
from drivetrain.core.traits import NamedLayout, Rule, Traits

if TYPE_CHECKING:
    from drivetrain.config.schema import RunConfig

Offload = Literal["none", "cpu", "nvme"]


class DeepSpeed(Section):
    """Handed to DeepSpeed's ZeRO."""

    zero_stage: Literal[1, 2, 3] | None = None
    """1: shard optimizer state. 2: gradients too. 3: weights too. null: as in `config`, or 2."""
    offload_optimizer: Offload | None = None
    """Keep optimizer state in host memory (cpu) or on a disk (nvme); null: as in `config`."""
    offload_param: Offload | None = None
    """Keep weights in host memory (cpu) or on a disk (nvme); stage 3 only."""
    nvme_path: Path | None = None
    """Directory on the disk that nvme offload uses."""
    config: Path | dict[str, Any] | None = None
    """Your own DeepSpeed settings: a JSON file or its contents. Settings that contradict this
    config are refused."""


def _run(config: RunConfig) -> Iterator[Problem]:
    if config.parallel.dp_replicate not in ("auto", 1):
        yield Problem(
            "parallel.dp_replicate",
            "ZeRO shards over all ranks",
            "leave it out, or use parallel.strategy=fsdp for replicas of shards",
            config.parallel.dp_replicate,
        )
    if config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            "DeepSpeed's loss scaling differs from Drivetrain's",
            "use bf16 or fp32, or parallel.strategy=fsdp",
            "fp16",
        )


def _offload(config: RunConfig) -> Iterator[Problem]:
    settings = config.parallel.details(DeepSpeed)
    if "nvme" in (settings.offload_optimizer, settings.offload_param) and not settings.nvme_path:
        yield Problem(
            "parallel.deepspeed.nvme_path",
            "offload to nvme needs a directory",
            "set it to one on the disk to use",
            has_value=False,
        )
    if settings.offload_param in ("cpu", "nvme") and settings.zero_stage in (1, 2):
        yield Problem(
            "parallel.deepspeed.offload_param",
            f"stage {settings.zero_stage} keeps a full copy of the weights on every device",
            "use zero_stage=3",
            settings.offload_param,
        )


_OFFLOAD_KEYS = tuple(
    f"parallel.deepspeed.{key}"
    for key in ("zero_stage", "offload_optimizer", "offload_param", "nvme_path")
)


def _stage(number: int) -> NamedLayout:
    settings = {"parallel.strategy": "deepspeed", "parallel.deepspeed.zero_stage": str(number)}
    return NamedLayout(("dp_shard",), settings)


TRAITS = Traits(
    name="deepspeed",
    summary="sharding and offload by DeepSpeed's ZeRO",
    section=DeepSpeed,
    strategy="drivetrain.strategies.deepspeed.strategy:make",
    cost="drivetrain.strategies.deepspeed.cost:COST",
    fills="dp_shard",
    rules=(
        Rule(("parallel.dp_replicate", "precision.dtype"), _run),
        Rule(_OFFLOAD_KEYS, _offload),
    ),
    is_proposed=True,
    packages=("deepspeed",),
    backends=("deepspeed",),
    known_as=("zero", "zero1", "zero-1", "zero2", "zero-2", "zero3", "zero-3"),
    layouts={"zero1": _stage(1), "zero2": _stage(2), "zero3": _stage(3)},
)
