"""Recursive halving and doubling: as few bytes as the ring, in as few rounds as the tree."""

import torch
import torch.distributed as dist


def halving_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place. The number of ranks is a power of 2."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    begin, end = 0, tensor.numel()
    halvings = []  # (partner, kept, given away), for the way back

    # Reduce-scatter: exchange halves of what is left with a partner, keep one half, add to it.
    distance = num_ranks // 2
    while distance >= 1:
        partner = rank ^ distance
        middle = (begin + end) // 2
        lower, upper = (begin, middle), (middle, end)
        kept, given = (lower, upper) if rank < partner else (upper, lower)
        incoming = torch.empty_like(tensor[slice(*kept)])
        exchange(tensor[slice(*given)], incoming, partner)
        tensor[slice(*kept)] += incoming
        halvings.append((partner, kept, given))
        begin, end = kept
        distance //= 2

    # All-gather: in reverse order, each partner returns the finished half that was given away.
    for partner, kept, given in reversed(halvings):
        exchange(tensor[slice(*kept)], tensor[slice(*given)], partner)


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor, partner: int) -> None:
    """Send and receive at the same time: both partners call this."""
    sending = dist.isend(outgoing, partner)
    dist.recv(incoming, partner)
    sending.wait()
