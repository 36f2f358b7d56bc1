"""Exercise recomputation: keep a block's input, and compute the rest again in backward.

Guidelines: guidelines.md, part 3. Check: drivetrain learn check recomputation
"""

from typing import Any

import torch
from torch import nn


def recompute(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """block(inputs), without keeping what is inside it until backward."""
    result: torch.Tensor = Recomputed.apply(block, inputs)
    return result


class Recomputed(torch.autograd.Function):
    """Saves the input only. Gradients are, to the last bit, those of block(inputs).

    The block may use dropout: what was dropped in forward must be dropped again. Nobody else may
    notice: the random numbers that are drawn afterwards are those that would have been drawn.

    Not allowed: torch.utils.checkpoint, which is this exercise.
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        # TODO 1: keep what backward will need; autograd records nothing inside of here.
        raise NotImplementedError("TODO 1 of Recomputed.forward")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # TODO 2: run the block again, recording, with forward's random state.
        # TODO 3: its backward, which adds to the .grad of the block's parameters.
        # TODO 4: leave the random state as it was; return a gradient for each argument of forward.
        raise NotImplementedError("TODO 2 to 4 of Recomputed.backward")
