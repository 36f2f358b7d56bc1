"""The samples that a rank reads in an epoch."""

import torch


def rank_indices(num_samples: int, epoch: int, seed: int, rank: int, num_ranks: int) -> list[int]:
    """Return the indices that `rank` reads in `epoch`: each sample on exactly one rank."""
    # Every rank computes the same order of the whole dataset, from the same numbers, so no message
    # is needed. The epoch is part of the seed, so that each epoch has its own order.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_samples, generator=generator).tolist()
    # Every num_ranks-th, starting at the rank: lengths differ by at most one, nothing is padded.
    return order[rank::num_ranks]
