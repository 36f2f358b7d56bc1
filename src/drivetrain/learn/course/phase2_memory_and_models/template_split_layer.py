"""Exercise split_layer: two linear layers, split among ranks by column and by row.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check split_layer
"""

from typing import Any

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


class SplitPair(nn.Module):
    """second(gelu(first(x))), with the hidden features split among the ranks.

    Every rank gets the whole layers and keeps its part, as parameters with these names:
    first_weight, first_bias, second_weight, second_bias. Rank 0 has the first hidden features. The
    number of hidden features is divisible by the number of ranks; weights are [out, in].
    """

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        # TODO 1: this rank's part of both layers (nn.Parameter of a copy). And second.bias?
        raise NotImplementedError("TODO 1 of SplitPair.__init__")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` is the same on all ranks, and so is the result. One message each way."""
        # TODO 2: nn.functional.linear, gelu, linear, between f and g.
        raise NotImplementedError("TODO 2 of SplitPair.forward")


class CopyToRanks(torch.autograd.Function):
    """f: from here on, ranks compute different things from the same input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        # TODO 3: what is sent?
        raise NotImplementedError("TODO 3 of CopyToRanks.forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # TODO 4: each rank has only the gradient of its own part.
        raise NotImplementedError("TODO 4 of CopyToRanks.backward")


class SumOverRanks(torch.autograd.Function):
    """g: adds up the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        # TODO 5: the sum of all ranks' inputs, on all ranks; do not change `inputs`.
        raise NotImplementedError("TODO 5 of SumOverRanks.forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # TODO 6: every rank already has the whole gradient of the sum.
        raise NotImplementedError("TODO 6 of SumOverRanks.backward")
