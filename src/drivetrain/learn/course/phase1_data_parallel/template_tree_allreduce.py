"""Exercise tree_allreduce: pairs, then pairs of pairs.

Guidelines: guidelines.md, part 4. Check: drivetrain learn check tree_allreduce
"""

import torch
import torch.distributed as dist  # noqa: F401


def tree_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank.

    Any number of ranks, including 3 or 5, in 2·⌈log₂n⌉ rounds. `tensor` has one dimension.

    Allowed: dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv.
    """
    # TODO 1: up the tree: at distance 1, 2, 4 …, half of the remaining ranks send and are done.
    # TODO 2: down the tree: the same messages in reverse.
    raise NotImplementedError("TODO 1 and 2 of tree_all_reduce")
