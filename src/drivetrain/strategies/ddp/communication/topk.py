"""top-k: a bucket's largest values travel with their places; what stays behind is sent later.

Each rank adds what it kept back to its next gradient (error feedback), so that nothing is lost,
only late. Ranks choose different places, so this is an all-gather: it grows with their number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from drivetrain.config.schema import TopK as TopKConfig
from drivetrain.strategies.ddp.communication.compressor import Mean, take_to

# torch 2.13 renamed it, and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TopK:
    """The largest `ratio` of each bucket."""

    name = "topk"

    def __init__(self, config: TopKConfig, group: dist.ProcessGroup) -> None:
        self._ratio = config.ratio
        self._group = group
        self._kept_back: dict[int, torch.Tensor] = {}

    def exchange(self, bucket: GradBucket) -> Mean:
        """Values and places in one message; their sum over ranks is in rank order everywhere."""
        gradient = bucket.buffer()
        values, places = self._take_largest(gradient, bucket.index())
        message = torch.cat([values.float().view(torch.int32), places.to(torch.int32)])
        num_ranks = self._group.size()
        received = message.new_empty(num_ranks * len(message))

        def add_up(_: torch.futures.Future[Any]) -> torch.Tensor:
            gradient.zero_()
            for numbers, at in received.view(num_ranks, 2, len(places)):
                gradient.index_add_(0, at, numbers.view(torch.float32).to(gradient.dtype))
            mean: torch.Tensor = gradient.div_(num_ranks)
            return mean

        work = _all_gather(received, message, group=self._group, async_op=True)
        future: Mean = work.get_future().then(add_up)
        return future

    def _take_largest(
        self, gradient: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent of the gradient and of what was kept back; the rest is kept now."""
        take_to(gradient.device, self._kept_back, index)
        kept = self._kept_back.get(index)
        if kept is None or kept.shape != gradient.shape:  # none yet, or of another bucket size
            kept = self._kept_back[index] = torch.zeros_like(gradient)
        kept.add_(gradient)
        count = max(1, round(self._ratio * gradient.numel()))
        places = torch.topk(kept.abs(), count, sorted=False).indices
        values = kept[places]
        kept[places] = 0
        return values, places

    def state_dict(self) -> dict[str, Any]:
        """By bucket: what was kept back."""
        return {"kept_back": dict(self._kept_back)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same."""
        self._kept_back = dict(state["kept_back"])
