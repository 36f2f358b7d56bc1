"""A sharded checkpoint that is either complete or absent, whenever a rank is killed."""

import os
from pathlib import Path

import torch
import torch.distributed as dist


def save(folder: Path, step: int, shard: dict[str, torch.Tensor]) -> None:
    """Save this rank's shard of `step`; called on every rank, with its own shard."""
    rank = dist.get_rank()
    target = folder / f"step-{step}"
    target.mkdir(exist_ok=True)
    write(target / f"rank-{rank}.pt", shard)
    # Every rank's file is written: only now may the step be marked.
    dist.barrier()
    if rank == 0:
        write(target / "complete", {})
        sync_folder(folder)
    # No rank returns before the step can be loaded.
    dist.barrier()


def write(path: Path, content: dict[str, torch.Tensor]) -> None:
    """Write a file atomically: under its name it is either whole or absent."""
    aside = path.with_name(f"{path.name}.new")
    with open(aside, "wb") as file:
        torch.save(content, file)
        file.flush()
        # Without fsync, the rename could reach the disk before the data.
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """File names are the folder's data, which is synced separately."""
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def load_newest(folder: Path, rank: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return the newest complete step and `rank`'s shard of it; None if there is none."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    for step in sorted(steps, reverse=True):
        if (folder / f"step-{step}" / "complete").exists():
            file = folder / f"step-{step}" / f"rank-{rank}.pt"
            return step, torch.load(file, weights_only=True)
    return None
