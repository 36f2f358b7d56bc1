"""Hierarchical all-reduce: each byte of the sum crosses the slow link as rarely as can be."""

import torch
import torch.distributed as dist
from torch import nn


def hierarchical_all_reduce(
    tensor: torch.Tensor, host: dist.ProcessGroup, across: dist.ProcessGroup
) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank."""
    num_local = dist.get_world_size(host)
    whole = nn.functional.pad(tensor, (0, -len(tensor) % num_local))

    # Fast links: the host's ranks have the sum of one part each, k parts for k ranks.
    part = torch.empty(len(whole) // num_local, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(part, whole, group=host)

    # The slow link: every rank sums its part with the ranks of the same place. All k of them do so
    # at the same time, so that a host with a network card per device uses all of them.
    dist.all_reduce(part, group=across)

    # Fast links again: all parts to all ranks of the host.
    dist.all_gather_into_tensor(whole, part, group=host)
    tensor.copy_(whole[: len(tensor)])
