"""The section `precision`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.core.section import Section


class Scaler(Section):
    """torch.amp.GradScaler's settings, used when precision.dtype is fp16."""

    init_scale: float = Field(default=65536.0, gt=0)
    """First loss scale."""
    growth_factor: float = Field(default=2.0, gt=1)
    """Multiply the scale by this after `growth_interval` clean steps."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """Multiply the scale by this after a step with infinities."""
    growth_interval: int = Field(default=2000, gt=0)
    """Clean steps in a row before the scale grows."""
    max_skipped_steps: int = Field(default=20, gt=0)
    """So many steps in a row that were skipped, because their gradients were not finite, end the
    run. The first few of a run are normal: the scale is being found."""


class Precision(Section):
    """Number formats. Weights and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the model computes in; bf16 and fp16 run under autocast."""
    tf32: bool | None = None
    """fp32 matrix products and convolutions on tensor cores that round to 10 bits: true: both (as
    torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 do); false:
    neither; null: as the script has set them, which by torch's default is convolutions only. With
    reproducibility=bitwise null means false."""
    scaler: Scaler = Scaler()
    """Loss scaling for fp16."""
