"""Tensor parallelism: the first layer split by column, the second by row, one sum in between."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class CopyToRanks(torch.autograd.Function):
    """f: forward changes nothing; backward sums, as each rank has only its part's gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class SumOverRanks(torch.autograd.Function):
    """g: forward sums; in backward, every rank already has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        total = inputs.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SplitPair(nn.Module):
    """second(gelu(first(x))), with the hidden features split among the ranks."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        size = first.out_features // dist.get_world_size()
        own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        # Weights are [out, in]: hidden features are the rows of one and the columns of the other.
        self.first_weight = nn.Parameter(first.weight.detach()[own].clone())
        self.first_bias = nn.Parameter(first.bias.detach()[own].clone())
        self.second_weight = nn.Parameter(second.weight.detach()[:, own].clone())
        self.second_bias = nn.Parameter(second.bias.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the same on all ranks."""
        copied = CopyToRanks.apply(inputs)
        hidden = nn.functional.gelu(
            nn.functional.linear(copied, self.first_weight, self.first_bias)
        )
        part = nn.functional.linear(hidden, self.second_weight)
        # After the sum, so that it is added once and not by every rank.
        return SumOverRanks.apply(part) + self.second_bias
