"""Which samples a rank reads in an epoch."""

import torch


def rank_indices(num_samples: int, epoch: int, seed: int, rank: int, num_ranks: int) -> list[int]:
    """The indices that `rank` reads in `epoch`: each sample on exactly one rank."""
    # Every rank computes the same order of the whole dataset, from the same numbers; no rank has
    # to tell another. The epoch is part of the seed, so that each epoch has an order of its own.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_samples, generator=generator).tolist()
    # Every num_ranks-th, beginning with the rank: lengths differ by one at most, nothing is padded.
    return order[rank::num_ranks]
