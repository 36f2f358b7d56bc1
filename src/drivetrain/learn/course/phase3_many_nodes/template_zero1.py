"""Exercise zero1: every rank keeps only the optimizer's state for its part of the parameters.

Guidelines: guidelines.md, part 2. Check: drivetrain learn check zero1
"""

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401
from torch import nn


class ShardedOptimizer:
    """Steps like one optimizer over all parameters with the mean gradient; each rank has 1/n of it.

    `optimizer_of(tensors)` makes a real optimizer for a list of tensors, for instance
    torch.optim.Adam(tensors, lr=0.01): its state is as large as the tensors, or twice that. It
    works element by element, so it can step a flat piece of many parameters as well as whole
    ones.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimizer_of: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        """Split all parameters, concatenated, into n parts of equal length; keep one.

        Their number need not be divisible by n.
        """
        # TODO 1: this rank's part of the parameters, and an optimizer for that part only.
        raise NotImplementedError("TODO 1 of ShardedOptimizer")

    def step(self) -> None:
        """Step from every rank's own .grad; afterwards all ranks have equal parameters.

        No rank sends more than 2(n−1)/n·S bytes, as in an all-reduce.
        """
        # TODO 2: dist.reduce_scatter_tensor(own_part, all_of_it): the sum of this rank's part.
        # TODO 3: step, on this part.
        # TODO 4: dist.all_gather_into_tensor(all_of_it, own_part), then copy into the parameters.
        raise NotImplementedError("TODO 2 to 4 of ShardedOptimizer")
