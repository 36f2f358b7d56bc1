"""Compressor: what becomes of a bucket of gradients between backward and the optimizer.

DDP hands over each bucket as it fills; the future it gets back must hold the mean over the ranks,
in the bucket's own memory. Buckets keep their index from step to step (`ddp._settle_buckets` has
put them in order before the first), so what is left over from one step can be kept under it.
"""
# No `from __future__ import annotations` here: DDP compares a hook's annotations as they are.

from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

Mean = torch.futures.Future[torch.Tensor]


class Compressor(Protocol):
    """One way to send a bucket."""

    name: str

    def exchange(self, bucket: GradBucket) -> Mean:
        """Begin to average this bucket over the ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs of the steps before; this rank's own."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


def take_to(device: torch.device, kept: dict[int, torch.Tensor], index: int) -> None:
    """What was loaded is on the CPU until its bucket's turn comes."""
    found = kept.get(index)
    if found is not None and found.device != device:
        kept[index] = found.to(device)


def install(compressor: Compressor, wrapped: DistributedDataParallel) -> None:
    """From now on, `wrapped` sends its buckets this way."""
    wrapped.register_comm_hook(compressor, _hook)


def _hook(compressor: Compressor, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return compressor.exchange(bucket)
