"""Exercise loss_scaling: train in fp16 and in bf16.

Guidelines: guidelines.md, part 2. Check: drivetrain learn check loss_scaling
"""

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


class LossScaler:
    """The factor by which the loss is multiplied before backward."""

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.num_good_steps = 0

    def update(self, has_overflowed: bool) -> None:
        """Halve the scale after an overflow, double it after `growth_interval` good steps."""
        # TODO 1: self.scale and self.num_good_steps; good steps count in a row.
        raise NotImplementedError("TODO 1 of LossScaler.update")


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    classes: torch.Tensor,
    dtype: torch.dtype,
    max_norm: float,
    scaler: LossScaler | None = None,
) -> bool:
    """One step on all ranks, computed in `dtype`; the weights stay in fp32.

    Every rank has its own tokens, the same number on each. The optimizer steps with the gradient
    of the mean over all of them, its norm clipped to `max_norm`. With torch.float16 there is a
    scaler; with torch.bfloat16 there is none. If a gradient has overflowed on any rank, no rank
    steps. Return whether the optimizer has stepped.
    """
    # TODO 2: forward in `dtype` (torch.autocast("cpu", dtype=dtype)); backward of the scaled loss.
    # TODO 3: average gradients over the ranks, in one all_reduce.
    # TODO 4: on overflow, all ranks skip the step. Update the scaler in either case.
    # TODO 5: otherwise unscale, clip (torch.nn.utils.clip_grad_norm_), step.
    raise NotImplementedError("TODO 2 to 5 of train_step")
