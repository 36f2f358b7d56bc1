"""Exercise zero3: no rank holds the whole model.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check zero3
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist  # noqa: F401


class Layer(Protocol):
    """What the check gives you: a layer that is told its parameters, instead of holding them."""

    num_parameters: int

    def initial(self) -> torch.Tensor:
        """Its first parameters, in one dimension; the same on every rank."""

    def compute(self, parameters: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Its outputs; torch can differentiate them."""


class ShardedLayers:
    """Layers one after another, of whose parameters every rank keeps 1/n.

    Each rank does, in every step:

        outputs = model.forward(inputs)
        …                             # the loss, and its gradient with respect to outputs
        model.backward(gradient)      # leaves a gradient in every shard's .grad
        optimizer.step()              # an optimizer over model.shards
    """

    shards: list[torch.Tensor]

    def __init__(self, layers: Sequence[Layer]) -> None:
        """One shard per layer: ⌈num_parameters / n⌉ elements, and no more than that is kept."""
        # TODO 1: self.shards.
        raise NotImplementedError("TODO 1 of ShardedLayers")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The last layer's outputs, without gradient.

        While a layer is computed, the parameters of the next one are on their way
        (dist.all_gather_into_tensor(whole, shard, async_op=True)), and no others are here.
        """
        # TODO 2: layer by layer: whole parameters, compute, free; keep what backward needs.
        raise NotImplementedError("TODO 2 of ShardedLayers")

    def backward(self, gradient: torch.Tensor) -> None:
        """`gradient` is that of the loss with respect to what forward returned, on this rank.

        Leaves in every shard's .grad the mean over all ranks.
        """
        # TODO 3: backwards: whole parameters again, compute again, torch.autograd.grad,
        #         dist.reduce_scatter_tensor of the parameters' gradient, free.
        raise NotImplementedError("TODO 3 of ShardedLayers")
