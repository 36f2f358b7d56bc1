"""Exercise hierarchical_allreduce: send as little as possible over the slow link between hosts.

Guidelines: guidelines.md, part 5. Check: drivetrain learn check hierarchical_allreduce
"""

import torch
import torch.distributed as dist


def hierarchical_all_reduce(
    tensor: torch.Tensor, host: dist.ProcessGroup, across: dist.ProcessGroup
) -> None:
    """Replace `tensor` by its sum over all ranks, in place, on every rank.

    `host` is the group of the k ranks on this rank's host. `across` is the group of the ranks at
    this rank's position on each of the h hosts. With 2 hosts of 3 ranks:

        host       [0, 1, 2] on host 0, [3, 4, 5] on host 1
        across     [0, 3], [1, 4], [2, 5]

    Between hosts, no host sends more than 2(h−1)/h·S bytes. `tensor` has one dimension; its length
    need not be divisible by k.

    Collectives take group=host or group=across; dist.get_world_size(host) is k.
    """
    # TODO 1: inside the host, so that each of its ranks has the host's sum of one part.
    # TODO 2: across hosts, of that part alone.
    # TODO 3: inside the host, so that each of its ranks has all parts.
    raise NotImplementedError("TODO 1 to 3 of hierarchical_all_reduce")
