"""Exercise halving_allreduce: exchange halves, then quarters, and so on.

Guidelines: guidelines.md, part 5. Check: drivetrain learn check halving_allreduce
"""

import torch
import torch.distributed as dist  # noqa: F401


def halving_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank.

    The number of ranks is a power of 2. `tensor` has one dimension; its length need not be
    divisible by it. No rank sends more than 2(n−1)/n·S bytes, in 2·log₂n rounds.

    Allowed: dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv.
    """
    # TODO 1: reduce-scatter: exchange half of what is left with a partner, add, and keep that half.
    # TODO 2: all-gather: the same exchanges in reverse order, copying.
    raise NotImplementedError("TODO 1 and 2 of halving_all_reduce")
