"""Batch norm with statistics over the micro-batches of all data-parallel ranks, on any device.

torch's SyncBatchNorm needs CUDA, and counts the placeholder data that a rank without samples runs
through the model to keep in step. This one uses plain operations and differentiable sums: with one
micro-batch per rank and step, the results are those of one process with the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class Sharers:
    """The ranks that share statistics, and whether this rank has samples in this micro-batch."""

    group: dist.ProcessGroup | None
    counts: bool = True

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks; backward sums the gradients."""
        total: torch.Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return total


class _Sum(torch.autograd.Function):
    """All-reduce whose backward sums the gradients, because every rank's loss uses the sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Sum.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class SharedBatchNorm(_BatchNorm):
    """The class that `share_statistics` gives a batch norm; names, weights and buffers stay."""

    sharers: Sharers

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize with statistics of all ranks in training, otherwise as torch does."""
        if not (self.training or self.running_mean is None):
            return super().forward(x)
        self._check_input_dim(x)
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            return self._normalized(wide).to(x.dtype)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        share = float(self.sharers.counts)  # a rank without samples takes part, and adds nothing
        own = x.new_full((1,), x.numel() / x.shape[1] * share)
        sums = self.sharers.sum(torch.cat([x.sum(dims) * share, own]))
        count = sums[-1].detach().clamp(min=1.0)
        mean = sums[:-1] / count
        apart = x - mean.view(shape)
        # not the mean square less the squared mean, which cancels
        variance = self.sharers.sum(apart.square().sum(dims) * share) / count
        self._follow(mean.detach(), variance.detach(), count)
        result = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update running statistics as torch does: with the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        share: torch.Tensor | float = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / self.num_batches_tracked.to(mean.dtype)
        unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
        for kept, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            kept.copy_(kept + (new - kept) * share)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms in training mode, by name."""
    named = model.named_modules()
    return {n: m for n, m in named if type(m) in KINDS and m.training}


def share_statistics(model: nn.Module, group: dist.ProcessGroup | None) -> Sharers:
    """Make every batch norm use all ranks of the group; the modules stay the same objects."""
    sharers = Sharers(group)
    for module in batch_norms(model).values():
        module.__class__ = SharedBatchNorm
        module.sharers = sharers  # type: ignore[assignment]
    return sharers
