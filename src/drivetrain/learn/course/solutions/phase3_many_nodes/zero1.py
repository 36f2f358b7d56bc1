"""ZeRO, stage 1: the optimizer's state is sharded over the ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn


class ShardedOptimizer:
    """Steps like one optimizer over all parameters; each rank has 1/n of it."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimizer_of: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = parameters
        length = sum(p.numel() for p in parameters)
        # Rounded up: with 437 elements on 4 ranks, 110 each, and the last 3 are padding.
        self.length = -(-length // dist.get_world_size())
        flat = self.flattened([p.detach() for p in parameters])
        begin = dist.get_rank() * self.length
        self.part = flat[begin : begin + self.length].clone()  # a view would keep all of flat
        self.optimizer = optimizer_of([self.part])

    def flattened(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        padding = self.length * dist.get_world_size() - len(flat)
        return nn.functional.pad(flat, (0, padding))

    def step(self) -> None:
        """Reduce-scatter, step, all-gather: an all-reduce, with the step in the middle."""
        whole = self.flattened([p.grad for p in self.parameters])
        gradient = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(gradient, whole)
        self.part.grad = gradient / dist.get_world_size()
        self.optimizer.step()
        self.part.grad = None

        dist.all_gather_into_tensor(whole, self.part)
        begin = 0
        with torch.no_grad():
            for parameter in self.parameters:
                piece = whole[begin : begin + parameter.numel()]
                parameter.copy_(piece.view_as(parameter))
                begin += parameter.numel()
