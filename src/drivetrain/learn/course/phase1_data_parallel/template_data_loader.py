"""Exercise data_loader: the samples that a rank reads in an epoch.

Guidelines: guidelines.md, part 1. Check: drivetrain learn check data_loader
"""

import torch  # noqa: F401


def rank_indices(num_samples: int, epoch: int, seed: int, rank: int, num_ranks: int) -> list[int]:
    """Return the indices that `rank` reads in `epoch`, a list of integers.

    Over all ranks, each of the samples 0 … num_samples − 1 is read exactly once, even when
    num_samples is not divisible by num_ranks. Ranks differ by at most one sample. The order is
    shuffled, differs in each epoch, and is the same for every call with the same arguments.
    """
    # TODO 1: an order of the whole dataset, the same on every rank.
    # TODO 2: this rank's part of that order.
    raise NotImplementedError("TODO 1 and 2 of rank_indices")
