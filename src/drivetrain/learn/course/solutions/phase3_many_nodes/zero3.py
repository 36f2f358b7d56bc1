"""ZeRO, stage 3: every rank keeps 1/n of the parameters, and gathers the rest when needed."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn


class ShardedLayers:
    """A sequence of layers; every rank keeps 1/n of each layer's parameters."""

    def __init__(self, layers) -> None:
        self.layers = layers
        self.shards = []
        self.inputs = []
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for layer in layers:
            length = -(-layer.num_parameters // num_ranks)
            whole = padded(layer.initial(), length * num_ranks)
            # A copy: a view would keep the whole layer alive.
            self.shards.append(whole[rank * length : (rank + 1) * length].clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.inputs = []
        with torch.no_grad():  # or autograd would keep every layer's parameters for its backward
            for index, parameters in self.gathered(range(len(self.layers))):
                self.inputs.append(inputs)
                inputs = self.layers[index].compute(parameters, inputs)
                del parameters  # before the layer after the next is gathered
        return inputs

    def backward(self, gradient: torch.Tensor) -> None:
        for index, parameters in self.gathered(reversed(range(len(self.layers)))):
            parameters.requires_grad_()
            inputs = self.inputs.pop().requires_grad_()
            outputs = self.layers[index].compute(parameters, inputs)
            gradient, whole = torch.autograd.grad(outputs, (inputs, parameters), gradient)
            del parameters, inputs, outputs
            self.reduce(index, whole)
            del whole

    def gathered(self, order: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each layer's whole parameters in turn, while the next layer's are gathered."""
        waiting = list(order)
        following = self.start_gather(waiting[0])
        while waiting:
            index = waiting.pop(0)
            whole, request = following
            request.wait()
            following = self.start_gather(waiting[0]) if waiting else None
            yield index, whole[: self.layers[index].num_parameters]

    def start_gather(self, index: int) -> tuple[torch.Tensor, dist.Work]:
        shard = self.shards[index]
        whole = torch.empty(len(shard) * dist.get_world_size())
        return whole, dist.all_gather_into_tensor(whole, shard, async_op=True)

    def reduce(self, index: int, whole: torch.Tensor) -> None:
        shard = self.shards[index]
        summed = torch.empty_like(shard)
        dist.reduce_scatter_tensor(summed, padded(whole, len(shard) * dist.get_world_size()))
        shard.grad = summed / dist.get_world_size()


def padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return nn.functional.pad(tensor, (0, length - len(tensor)))
