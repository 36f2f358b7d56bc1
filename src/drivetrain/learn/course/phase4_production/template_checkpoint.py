"""Exercise checkpoint: save a sharded state so that it survives kill -9 at any moment.

Guidelines: guidelines.md, part 1. Check: drivetrain learn check checkpoint
"""

import os  # noqa: F401
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: F401


def save(folder: Path, step: int, shard: dict[str, torch.Tensor]) -> None:
    """Save this rank's shard of `step`; called on every rank, with its own shard.

    The folder exists, and has earlier steps in it, and perhaps the rest of a save that was killed,
    even of the same step. When save returns, on any rank, the step can be loaded, even after the
    power fails. Until then the step before can be.
    """
    # TODO 1: this rank's file: written aside, synced to the disk (os.fsync), renamed.
    # TODO 2: when all ranks have theirs, and not before: mark the step as complete.
    raise NotImplementedError("TODO 1 and 2 of save")


def load_newest(folder: Path, rank: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """The newest complete step and `rank`'s shard of it; None if there is none.

    Called without a process group. Whatever a killed save has left behind, this does not fail.
    torch.load(…, weights_only=True) reads without running anything that is in the file.
    """
    # TODO 3
    raise NotImplementedError("TODO 3 of load_newest")
