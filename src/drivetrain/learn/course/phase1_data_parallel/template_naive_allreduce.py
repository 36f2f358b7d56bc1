"""Exercise naive_allreduce: everything goes to rank 0 and back.

Guidelines: guidelines.md, part 3. Check: drivetrain learn check naive_allreduce
"""

import torch
import torch.distributed as dist  # noqa: F401


def naive_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank.

    `tensor` has one dimension and any length.

    Allowed: dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv.
    """
    # TODO 1: ranks 1, 2 … send their tensor to rank 0, which adds it to its own.
    # TODO 2: rank 0 sends the sum to all other ranks.
    raise NotImplementedError("TODO 1 and 2 of naive_all_reduce")
