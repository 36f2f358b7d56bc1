"""Exact resume: what depends only on the step is recomputed, and the rest is in the state."""

import copy
from typing import Any

import torch


def micro_batch_ids(
    seed: int, num_samples: int, size: int, step: int, micro_batch: int, num_micro_batches: int
) -> list[int]:
    """Return the samples of one micro-batch of one step."""
    first = (step * num_micro_batches + micro_batch) * size
    return [sample_at(position, seed, num_samples) for position in range(first, first + size)]


def sample_at(position: int, seed: int, num_samples: int) -> int:
    """Return the sample at a position of the run: the epochs' orders follow one another."""
    epoch, place = divmod(position, num_samples)
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    return int(torch.randperm(num_samples, generator=generator)[place])


def generator_of(seed: int, step: int, micro_batch: int) -> torch.Generator:
    """Return the generator for dropout."""
    return torch.Generator().manual_seed((seed * 100_003 + step) * 1009 + micro_batch)


def capture(job: Any) -> dict[str, Any]:
    """Return everything that `restore` needs."""
    # Copies: state_dict() returns the tensors themselves, and the next step changes them.
    return copy.deepcopy(
        {
            "model": job.model.state_dict(),
            "optimizer": job.optimizer.state_dict(),
            "scheduler": job.scheduler.state_dict(),
            "step": job.step,
        }
    )


def restore(job: Any, state: dict[str, Any]) -> None:
    """Load what `capture` returned into a new job, on any number of ranks."""
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.scheduler.load_state_dict(state["scheduler"])
    job.step = state["step"]
