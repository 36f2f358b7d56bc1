"""DDP: gradients in buckets, reduced while backward still runs."""

import torch
import torch.distributed as dist
from torch import nn


class BucketedDDP:
    """Averages a model's gradients over all ranks, bucket by bucket."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        # Backward begins with the last layer: the first bucket is the first to be complete.
        self.buckets = pack(list(model.parameters())[::-1], bucket_bytes)
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.mark_ready)
        self.begin_step()

    def begin_step(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.started = []  # (flat tensor, request) of each bucket started so far

    def mark_ready(self, parameter: nn.Parameter) -> None:
        self.missing[self.bucket_of[parameter]] -= 1
        # In the order of the buckets, not in that of completion: ranks may differ in which bucket
        # is complete first, and collectives are matched only by the order of calls.
        while len(self.started) < len(self.buckets) and self.missing[len(self.started)] == 0:
            self.start_next()

    def start_next(self) -> None:
        bucket = self.buckets[len(self.started)]
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([piece.flatten() for piece in pieces])
        self.started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Return when every .grad is the mean over all ranks."""
        while len(self.started) < len(self.buckets):  # parameters that this rank did not use
            self.start_next()
        for bucket, (flat, request) in zip(self.buckets, self.started, strict=True):
            request.wait()
            mean = flat / dist.get_world_size()
            pieces = mean.split([p.numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
        self.begin_step()


def pack(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Fill buckets in order; begin a new one when the next parameter would not fit."""
    buckets, filled = [], 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += size
    return buckets
