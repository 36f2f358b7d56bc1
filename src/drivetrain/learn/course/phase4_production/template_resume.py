"""Exercise resume: go on after an interruption as if there had been none, to the last bit.

Guidelines: guidelines.md, part 2. Check: drivetrain learn check resume
"""

from typing import Any

import torch


def micro_batch_ids(
    seed: int, num_samples: int, size: int, step: int, micro_batch: int, num_micro_batches: int
) -> list[int]:
    """The samples of one micro-batch of one step (both counted from 0).

    Micro-batches follow each other, step after step, through the dataset: each epoch reads every
    sample once, in an order of its own. A micro-batch may begin in one epoch and end in the next.
    """
    # TODO 1: from the arguments alone. Which sample is the one at position 1234 of the whole run?
    raise NotImplementedError("TODO 1 of micro_batch_ids")


def generator_of(seed: int, step: int, micro_batch: int) -> torch.Generator:
    """What dropout is drawn from: the same on whichever rank the micro-batch is computed."""
    # TODO 2
    raise NotImplementedError("TODO 2 of generator_of")


def capture(job: Any) -> dict[str, Any]:
    """All that `restore` needs, as tensors, numbers, text, lists and dicts.

    job.model, job.optimizer, job.scheduler (torch's), job.step (how many steps are done). Training
    goes on while what you return is written to disk.
    """
    # TODO 3
    raise NotImplementedError("TODO 3 of capture")


def restore(job: Any, state: dict[str, Any]) -> None:
    """Put what `capture` returned into a new job, on any number of ranks."""
    # TODO 4
    raise NotImplementedError("TODO 4 of restore")
