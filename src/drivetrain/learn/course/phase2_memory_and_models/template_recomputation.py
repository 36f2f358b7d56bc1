"""Exercise recomputation: keep a block's input, and recompute the rest in backward.

Guidelines: guidelines.md, part 3. Check: drivetrain learn check recomputation
"""

from typing import Any

import torch
from torch import nn


def recompute(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return block(inputs), without keeping its inner activations until backward."""
    result: torch.Tensor = Recomputed.apply(block, inputs)
    return result


class Recomputed(torch.autograd.Function):
    """Saves only the input. Gradients are those of block(inputs), bit for bit.

    The block may use dropout: backward must drop the same elements as forward. This must have no
    effect outside: the random numbers drawn afterwards are the same as without recomputation.

    Not allowed: torch.utils.checkpoint, which already does this.
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        # TODO 1: keep what backward will need; autograd records nothing in here.
        raise NotImplementedError("TODO 1 of Recomputed.forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # TODO 2: run the block again, recorded, with forward's random state.
        # TODO 3: its backward, which adds to the .grad of the block's parameters.
        # TODO 4: leave the random state as it was; return a gradient for each argument of forward.
        raise NotImplementedError("TODO 2 to 4 of Recomputed.backward")
