"""Gradients in 16 bits, and as they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

from drivetrain.strategies.ddp.communication.compressor import Mean


class Plain:
    """As they are."""

    name = "none"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def exchange(self, bucket: GradBucket) -> Mean:
        """One all-reduce."""
        return allreduce_hook(self.group, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing was kept."""


class Float16(Plain):
    """11 bits of mantissa; beyond 65,504 there is only infinity."""

    name = "fp16"

    def exchange(self, bucket: GradBucket) -> Mean:
        """By torch."""
        return fp16_compress_hook(self.group, bucket)


class BFloat16(Plain):
    """8 bits of mantissa, fp32's range. torch's own hook is for NCCL alone."""

    name = "bf16"

    def exchange(self, bucket: GradBucket) -> Mean:
        """Divide, round, add up, widen."""
        buffer = bucket.buffer()
        small = (buffer / self.group.size()).to(torch.bfloat16)

        def widen(sent: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            mean: torch.Tensor = buffer.copy_(sent.value()[0])
            return mean

        work = dist.all_reduce(small, group=self.group, async_op=True)
        future: Mean = work.get_future().then(widen)
        return future
