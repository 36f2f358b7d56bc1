"""Ring attention: keys and values travel round the ring, with a running softmax."""

import torch
import torch.distributed as dist


def ring_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """softmax(Q·Kᵀ / √width)·V for this rank's queries, over the keys and values of all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    length, width = queries.shape
    block = torch.stack([keys, values])  # one message instead of two
    largest = torch.full((length, 1), -torch.inf)
    total = torch.zeros(length, 1)
    output = torch.zeros_like(queries)

    for step in range(num_ranks):
        is_last = step == num_ranks - 1
        if not is_last:  # the next block travels while this one is used
            following = torch.empty_like(block)
            sending = dist.isend(block, (rank + 1) % num_ranks)
            receiving = dist.irecv(following, (rank - 1) % num_ranks)

        scores = queries @ block[0].T / width**0.5
        if is_causal:
            owner = (rank - step) % num_ranks
            query_places = rank * length + torch.arange(length)
            key_places = owner * length + torch.arange(length)
            scores[key_places[None, :] > query_places[:, None]] = -torch.inf

        # Weights are relative to the largest score so far. When a larger one arrives, the earlier
        # sums are multiplied by the same factor.
        before, largest = largest, torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        shrink = torch.exp(before - largest)
        weights = torch.exp(scores - largest)
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        output = output * shrink + weights @ block[1]

        if not is_last:
            sending.wait()
            receiving.wait()
            block = following
    return output / total
