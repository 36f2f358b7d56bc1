"""Preemption: note the signal, finish the step, agree, save, and ask to be restarted."""

import signal
from typing import Any

import torch
import torch.distributed as dist

REQUEUE = 75


def train(job: Any, save_every: int) -> int:
    """Train to the last step, or until SIGTERM; return the process's exit code."""
    is_asked = False

    def note(number: int, frame: Any) -> None:
        # Only set a flag: the process first finishes what it is doing.
        nonlocal is_asked
        is_asked = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        while job.step < job.num_steps:
            job.one_step()
            is_last = job.step == job.num_steps
            must_stop = any_rank(is_asked)
            if must_stop or is_last or job.step % save_every == 0:
                job.save()
            if must_stop and not is_last:
                return REQUEUE
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def any_rank(is_asked: bool) -> bool:
    """Return the same answer on all ranks: they have to stop after the same step."""
    asked = torch.tensor([int(is_asked)])
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked)
