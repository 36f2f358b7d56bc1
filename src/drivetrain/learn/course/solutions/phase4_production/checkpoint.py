"""A sharded checkpoint that is either complete or not there, whenever a rank is killed."""

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
    # Every rank's file is there: only now may anyone say so.
    dist.barrier()
    if rank == 0:
        write(target / "complete", {})
        sync_folder(folder)
    # Nobody returns before the step can be loaded.
    dist.barrier()


def write(path: Path, content: dict[str, torch.Tensor]) -> None:
    """Under its name, a file is either whole or not there."""
    aside = path.with_name(f"{path.name}.new")
    with open(aside, "wb") as file:
        torch.save(content, file)
        file.flush()
        # A rename may reach the disk before the data does; after fsync it cannot.
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names are the folder's data, and are synced by themselves."""
    number = os.open(folder, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def load_newest(folder: Path, rank: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """The newest complete step and `rank`'s shard of it; None if there is none."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
    for step in sorted(steps, reverse=True):
        if (folder / f"step-{step}" / "complete").exists():
            file = folder / f"step-{step}" / f"rank-{rank}.pt"
            return step, torch.load(file, weights_only=True)
    return None
