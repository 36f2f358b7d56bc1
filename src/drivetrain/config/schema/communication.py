"""The section `communication`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.core.section import Section


class PowerSGD(Section):
    """torch's PowerSGD hook: each gradient matrix as the product of two thin ones."""

    rank: int = Field(default=4, gt=0)
    """Columns of the thin matrices: more is closer to the gradient, and more to send."""
    start_step: int = Field(default=10, ge=2)
    """Steps before it that send gradients whole; torch needs two."""
    min_compression_rate: float = Field(default=2.0, ge=0)
    """Matrices that would shrink by less than this travel whole."""


class TopK(Section):
    """Only the largest gradients travel; the rest is added to the next step's."""

    ratio: float = Field(default=0.01, gt=0, le=1)
    """The fraction of each bucket that is sent."""


class Communication(Section):
    """What gradients look like on the wire, with ddp on more than one rank."""

    compression: Literal["none", "fp16", "bf16", "powersgd", "topk", "auto"] = "none"
    """fp16 and bf16 halve the traffic; powersgd and topk shrink it much more, and are lossy. auto:
    measures, and keeps plain gradients unless one of `allow` makes steps shorter."""
    allow: tuple[Literal["fp16", "bf16", "powersgd", "topk"], ...] = ("bf16", "fp16")
    """What auto may choose from; the first of equals wins."""
    powersgd: PowerSGD = PowerSGD()
    """Details for powersgd."""
    topk: TopK = TopK()
    """Details for topk."""
