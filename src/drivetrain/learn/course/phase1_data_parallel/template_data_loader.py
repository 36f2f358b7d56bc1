"""Exercise data_loader: which samples does a rank read in an epoch?

Guidelines: guidelines.md, part 1. Check: drivetrain learn check data_loader
"""

import torch  # noqa: F401


def rank_indices(num_samples: int, epoch: int, seed: int, rank: int, num_ranks: int) -> list[int]:
    """The indices that `rank` reads in `epoch`, a list of whole numbers.

    Over all ranks, each of the samples 0 … num_samples − 1 is read exactly once: none twice, none
    never, also when num_samples is not divisible by num_ranks. Ranks differ by one sample at most.
    The order is shuffled, another one in each epoch, and the same whenever it is asked for.
    """
    # TODO 1: an order of the whole dataset that every rank computes alike.
    # TODO 2: this rank's part of it.
    raise NotImplementedError("TODO 1 and 2 of rank_indices")
