"""Exercise trainer: one synchronous data-parallel step.

Guidelines: guidelines.md, part 2. Check: drivetrain learn check trainer
"""

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


def backward_and_average(
    model: nn.Module, inputs: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Leave in every parameter's `.grad` the gradient of the mean loss over all ranks' tokens.

    Each rank calls this with its own tokens (rows of `inputs`, numbers in `classes`); there may be
    3 on one rank, 17 on another, and none on a third. Gradients are zero before the call, and the
    caller then steps the optimizer. Return the mean loss over all ranks' tokens, on every rank.

    dist.all_reduce is allowed here: you write your own in the next exercises.
    """
    # TODO 1: the loss of this rank's tokens (nn.functional.cross_entropy), and its backward.
    # TODO 2: exchange gradients, so that all ranks have that of the mean over all tokens.
    # TODO 3: the mean loss over all tokens.
    raise NotImplementedError("TODO 1 to 3 of backward_and_average")
