"""Exercise pipeline: a model in stages, and two orders in which to run them.

Guidelines: guidelines.md, part 5. Check: drivetrain learn check pipeline
"""

from typing import Any

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401

Schedule = list[tuple[str, int]]
"""What a stage does, in order: ("forward", micro-batch) or ("backward", micro-batch), from 0."""


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards; the same order of micro-batches on every stage."""
    # TODO 1
    raise NotImplementedError("TODO 1 of gpipe")


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Schedule:
    """As few forwards ahead as keep all stages busy, then forward and backward alternately.

    Stage s never holds more than num_stages − s micro-batches (forward done, backward not).
    """
    # TODO 2: warm-up, then one forward and one backward alternately, then the rest.
    raise NotImplementedError("TODO 2 of one_f_one_b")


def run(schedule: Schedule, stage: Any) -> None:
    """Run one step of this rank's stage; rank r runs stage r.

    stage.is_first, stage.is_last, stage.shape (of the tensors between stages, float32)
    stage.forward(micro_batch, inputs)      → outputs; the first stage has its own inputs (None),
                                              and the last one returns None
    stage.backward(micro_batch, gradient)   → gradient of its inputs; the last stage begins with its
                                              loss (None), and the first one returns None
    """
    # TODO 3: receive, compute, send. No rank may wait for a send that the other side cannot take.
    raise NotImplementedError("TODO 3 of run")
