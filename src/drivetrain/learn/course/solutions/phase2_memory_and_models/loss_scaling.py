"""fp16 with dynamic loss scaling, and bf16, which needs none."""

import torch
import torch.distributed as dist
from torch import nn


class LossScaler:
    """The factor by which the loss is multiplied before backward."""

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.num_good_steps = 0

    def update(self, has_overflowed: bool) -> None:
        """Halve the scale after an overflow; double it after enough good steps in a row."""
        if has_overflowed:
            self.scale /= 2
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale *= 2
            self.num_good_steps = 0


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    classes: torch.Tensor,
    dtype: torch.dtype,
    max_norm: float,
    scaler: LossScaler | None = None,
) -> bool:
    """One step on all ranks, computed in `dtype`; the weights stay in fp32."""
    scale = scaler.scale if scaler else 1.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(model(inputs), classes)
    (loss * scale).backward()

    parameters = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)

    # After the sum, an inf or nan of one rank is in every rank's copy, so all decide the same.
    has_overflowed = not bool(torch.isfinite(flat).all())
    if scaler:
        scaler.update(has_overflowed)
    if has_overflowed:
        return False

    # With the scale that the loss was multiplied by: update() may have changed scaler.scale.
    flat /= scale * dist.get_world_size()
    begin = 0
    for parameter in parameters:
        parameter.grad.copy_(flat[begin : begin + parameter.numel()].view_as(parameter))
        begin += parameter.numel()
    nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    return True
