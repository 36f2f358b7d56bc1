"""Exercise checkpoint: save a sharded state so that it survives kill -9 at any moment.

Guidelines: guidelines.md, part 1. Check: drivetrain learn check checkpoint
"""

import os  # noqa: F401
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: F401


def save(folder: Path, step: int, shard: dict[str, torch.Tensor]) -> None:
    """Save this rank's shard of `step`; called on every rank, with its own shard.

    The folder exists. It may have earlier steps, and leftovers of a save that was killed, even of
    the same step. When save returns on any rank, the step can be loaded, even after a power
    failure. Until then the step before can be loaded.
    """
    # TODO 1: this rank's file: write to a temporary name, sync to the disk (os.fsync), rename.
    # TODO 2: only when all ranks have written theirs, mark the step as complete.
    raise NotImplementedError("TODO 1 and 2 of save")


def load_newest(folder: Path, rank: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return the newest complete step and `rank`'s shard of it; None if there is none.

    Called without a process group. Must not fail, whatever a killed save has left behind.
    torch.load(…, weights_only=True) reads without running code from the file.
    """
    # TODO 3
    raise NotImplementedError("TODO 3 of load_newest")
