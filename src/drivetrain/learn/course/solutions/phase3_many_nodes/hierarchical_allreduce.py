"""Hierarchical all-reduce: as few bytes as possible cross the slow link between hosts."""

import torch
import torch.distributed as dist
from torch import nn


def hierarchical_all_reduce(
    tensor: torch.Tensor, host: dist.ProcessGroup, across: dist.ProcessGroup
) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank."""
    num_local = dist.get_world_size(host)
    whole = nn.functional.pad(tensor, (0, -len(tensor) % num_local))

    # Fast links: each of the host's k ranks gets the sum of one of k parts.
    part = torch.empty(len(whole) // num_local, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(part, whole, group=host)

    # The slow link: every rank sums its part with the ranks at the same position. All k do so at
    # the same time, so a host with one network card per device uses all cards.
    dist.all_reduce(part, group=across)

    # Fast links again: all parts to all ranks of the host.
    dist.all_gather_into_tensor(whole, part, group=host)
    tensor.copy_(whole[: len(tensor)])
