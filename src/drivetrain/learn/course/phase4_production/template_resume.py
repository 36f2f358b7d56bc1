"""Exercise resume: resume after an interruption as if there had been none, bit for bit.

Guidelines: guidelines.md, part 2. Check: drivetrain learn check resume
"""

from typing import Any

import torch


def micro_batch_ids(
    seed: int, num_samples: int, size: int, step: int, micro_batch: int, num_micro_batches: int
) -> list[int]:
    """Return the samples of one micro-batch of one step (both counted from 0).

    Micro-batches follow each other, step after step, through the dataset: each epoch reads every
    sample once, in its own order. A micro-batch may begin in one epoch and end in the next.
    """
    # TODO 1: from the arguments alone. Which sample is at position 1234 of the whole run?
    raise NotImplementedError("TODO 1 of micro_batch_ids")


def generator_of(seed: int, step: int, micro_batch: int) -> torch.Generator:
    """Return the generator for dropout: the same on any rank that computes the micro-batch."""
    # TODO 2
    raise NotImplementedError("TODO 2 of generator_of")


def capture(job: Any) -> dict[str, Any]:
    """Return everything that `restore` needs, as tensors, numbers, text, lists and dicts.

    job.model, job.optimizer, job.scheduler (torch's), job.step (how many steps are done). Training
    continues while the returned state is written to disk.
    """
    # TODO 3
    raise NotImplementedError("TODO 3 of capture")


def restore(job: Any, state: dict[str, Any]) -> None:
    """Load what `capture` returned into a new job, on any number of ranks."""
    # TODO 4
    raise NotImplementedError("TODO 4 of restore")
