"""Naive all-reduce: everything goes to rank 0, which adds it up and sends it back."""

import torch
import torch.distributed as dist


def naive_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return
    incoming = torch.empty_like(tensor)
    for source in range(1, num_ranks):
        dist.recv(incoming, src=source)
        tensor += incoming
    # Only now: a rank that gets the tensor earlier gets only a part of the sum.
    for target in range(1, num_ranks):
        dist.send(tensor, dst=target)
