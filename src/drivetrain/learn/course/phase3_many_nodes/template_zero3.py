"""Exercise zero3: no rank holds the whole model.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check zero3
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist  # noqa: F401


class Layer(Protocol):
    """What the check passes: a layer that takes its parameters as an argument."""

    num_parameters: int

    def initial(self) -> torch.Tensor:
        """Return its initial parameters, in one dimension; the same on every rank."""

    def compute(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return its outputs; torch can differentiate them."""


class ShardedLayers:
    """A sequence of layers; every rank keeps 1/n of each layer's parameters.

    Each rank does, in every step:

        outputs = model.forward(inputs)
        …                             # the loss, and its gradient with respect to outputs
        model.backward(gradient)      # leaves a gradient in every shard's .grad
        optimizer.step()              # an optimizer over model.shards
    """

    shards: list[torch.Tensor]

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Keep one shard per layer, ⌈num_parameters / n⌉ elements, and nothing else."""
        # TODO 1: self.shards.
        raise NotImplementedError("TODO 1 of ShardedLayers")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the last layer's outputs, without gradient.

        While a layer is computed, the parameters of the next one are being gathered
        (dist.all_gather_into_tensor(whole, shard, async_op=True)), and no others are in memory.
        """
        # TODO 2: layer by layer: gather, compute, free; keep what backward needs.
        raise NotImplementedError("TODO 2 of ShardedLayers")

    def backward(self, gradient: torch.Tensor) -> None:
        """Leave in every shard's .grad the mean over all ranks.

        `gradient` is this rank's gradient of the loss with respect to what forward returned.
        """
        # TODO 3: in reverse order: gather again, compute again, torch.autograd.grad,
        #         dist.reduce_scatter_tensor of the parameters' gradient, free.
        raise NotImplementedError("TODO 3 of ShardedLayers")
