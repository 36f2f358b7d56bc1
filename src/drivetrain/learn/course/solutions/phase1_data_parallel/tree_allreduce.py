"""Tree all-reduce: pairs, then pairs of pairs; log₂n rounds up to rank 0, and log₂n down."""

import torch
import torch.distributed as dist


def tree_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    # Up: at distance d, ranks that are odd multiples of d send to the even one below; then done.
    distance = 1
    while distance < num_ranks:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
            break
        if rank + distance < num_ranks:  # with 5 ranks, rank 4 has no partner for two rounds
            incoming = torch.empty_like(tensor)
            dist.recv(incoming, rank + distance)
            tensor += incoming
        distance *= 2

    # Down: the same messages in reverse, from the largest distance to the smallest.
    distance = 1
    while distance * 2 < num_ranks:
        distance *= 2
    while distance >= 1:
        if rank % (2 * distance) == 0 and rank + distance < num_ranks:
            dist.send(tensor, rank + distance)
        elif rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        distance //= 2
