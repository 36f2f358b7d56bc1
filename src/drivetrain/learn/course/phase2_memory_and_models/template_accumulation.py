"""Exercise accumulation: a batch in several micro-batches, and one reduction.

Guidelines: guidelines.md, part 1. Check: drivetrain learn check accumulation
"""

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


def accumulate(
    model: nn.Module, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Leave in every parameter's `.grad` the gradient of the mean loss over all tokens.

    That is over all micro-batches (inputs, classes) of all ranks. Micro-batches differ in their
    number of tokens, and ranks in their number of micro-batches; each rank has at least one.
    Gradients are zero before the call, and the caller then steps the optimizer. Return the mean
    loss over all tokens, on every rank.

    Only one micro-batch's activations are in memory at a time, and gradients are sent once a step.
    """
    # TODO 1: forward and backward of each micro-batch. What must be divided, and when?
    # TODO 2: one reduction over the ranks.
    # TODO 3: the mean loss over all tokens.
    raise NotImplementedError("TODO 1 to 3 of accumulate")
