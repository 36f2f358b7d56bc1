"""Exercise ring_attention: attention over a sequence that no rank holds as a whole.

Guidelines: guidelines.md, part 8. Check: drivetrain learn check ring_attention
"""

import torch
import torch.distributed as dist  # noqa: F401


def ring_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """softmax(Q·Kᵀ / √width)·V for this rank's queries, over the keys and values of all ranks.

    Rank r has block r of the sequence: tokens r·length … (r+1)·length − 1. All three tensors have
    the shape (length, width), the same on all ranks. If causal, a token attends only to itself
    and to tokens before it.

    Rank r sends to rank r + 1 only, n−1 blocks of keys and values in all.

    Allowed: dist.send, dist.recv, dist.isend, dist.irecv, dist.batch_isend_irecv.
    """
    # TODO 1: send blocks of keys and values around the ring.
    # TODO 2: the running softmax: largest score, sum of weights and weighted sum of values so far.
    # TODO 3: the mask, by the positions of this rank's queries and of the block's keys.
    raise NotImplementedError("TODO 1 to 3 of ring_attention")
