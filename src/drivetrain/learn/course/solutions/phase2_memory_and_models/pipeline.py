"""Pipeline parallelism: GPipe and 1F1B as lists of actions, and one function that runs them."""

from typing import Any

import torch
import torch.distributed as dist

Schedule = list[tuple[str, int]]


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    forwards = [("forward", i) for i in range(num_micro_batches)]
    return forwards + [("backward", i) for i in range(num_micro_batches)]


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Schedule:
    """As few forwards ahead as keep all stages busy, then forward and backward alternately."""
    # Until the first gradient can arrive, the later stages need this many forwards.
    num_ahead = min(num_stages - stage - 1, num_micro_batches)
    schedule = [("forward", i) for i in range(num_ahead)]
    for i in range(num_micro_batches - num_ahead):
        schedule += [("forward", num_ahead + i), ("backward", i)]
    left = range(num_micro_batches - num_ahead, num_micro_batches)
    return schedule + [("backward", i) for i in left]


def run(schedule: Schedule, stage: Any) -> None:
    """Run one step of this rank's stage."""
    rank = dist.get_rank()
    sending = []
    for what, micro_batch in schedule:
        if what == "forward":
            inputs = None if stage.is_first else receive(stage.shape, rank - 1)
            outputs = stage.forward(micro_batch, inputs)
            if not stage.is_last:
                sending.append(dist.isend(outputs, rank + 1))
        else:
            gradient = None if stage.is_last else receive(stage.shape, rank + 1)
            outgoing = stage.backward(micro_batch, gradient)
            if not stage.is_first:
                sending.append(dist.isend(outgoing, rank - 1))
    # Only at the end: a rank that waits for its neighbour to receive does not compute, and two
    # neighbours that send to each other would both wait for ever.
    for request in sending:
        request.wait()


def receive(shape: Any, source: int) -> torch.Tensor:
    """Receive what a neighbour sends next."""
    tensor = torch.empty(shape)
    dist.recv(tensor, source)
    return tensor
