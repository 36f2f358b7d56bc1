"""The section `optimization`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.core.section import Section


class Optimization(Section):
    """The learning rate and what is done to gradients. All of it counts optimizer steps."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate, before `learning_rate_scaling`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a fraction of the peak."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale `learning_rate` by (global_batch_size / base_batch_size), or by its square root."""
    base_batch_size: int | None = Field(default=None, gt=0)
    """The global batch size that `learning_rate` was tuned for."""
    weight_decay: float = Field(default=0.0, ge=0)
    """For the default optimizer (AdamW); a task with its own optimizer sets its own."""
    adamw_implementation: Literal["auto", "for_loop", "foreach", "fused"] = "auto"
    """How the default optimizer goes through the weights: one after the other, many in one call, or
    in one kernel. auto: as torch chooses: for_loop on a CPU, foreach on CUDA, XPU and devices from
    outside torch. They round differently in the last bits; fused is the fastest."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the global gradient norm to this; null leaves gradients alone."""
