"""Plain DistributedDataParallel, every line explained, and nothing of Drivetrain in it.

    examples/launch.sh examples/ddp_template.py 2
    torchrun --nproc-per-node 2 examples/ddp_template.py
    drivetrain train --nproc-per-node 2 examples/ddp_template.py

What is left to you here, and what `Trainer` or `prepare` does for you, stands beside it as (*).
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED, BATCH_PER_RANK, EPOCHS = 0, 32, 5
SAVED = Path("ddp_template.pt")


def main() -> None:
    """One rank: the same program runs once for each."""
    # Which rank this is: the launcher says so in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    # MASTER_PORT. NCCL talks between GPUs, gloo between CPUs.
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # LOCAL_RANK counts on this machine, RANK over all: a device is chosen by the first.
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)

    # Every rank must have the same data in the same order, or the sampler's parts overlap.
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(1000, 20, generator=generator)
    dataset = TensorDataset(pixels, (pixels[:, :10].sum(1) > pixels[:, 10:].sum(1)).long())

    # Each rank reads its own part. When the samples do not divide evenly, the first are repeated
    # so that all ranks make the same number of steps. (*) Here nothing is repeated.
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=SEED)
    loader = DataLoader(dataset, BATCH_PER_RANK, sampler=sampler, pin_memory=has_gpu)

    # The same seed, or not: DDP sends rank 0's weights to all when it wraps the model.
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    spread = DistributedDataParallel(model, device_ids=[local_rank] if has_gpu else None)

    # The optimizer has the model's own parameters, which DDP leaves where they are. The batch of
    # a step is BATCH_PER_RANK × world_size: more ranks are another training, and the learning
    # rate may have to follow. (*) With global_batch_size it is the same training on any number.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # left out, every epoch has the first one's order
        total = torch.zeros(2, device=device)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(spread(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the ranks while this runs
            optimizer.step()  # so every rank makes the same step, and the copies stay copies
            total += torch.stack([loss.detach() * len(inputs), torch.ones_like(loss) * len(inputs)])

        # A loss is this rank's own until somebody adds them up; every rank has to call it.
        dist.all_reduce(total)
        if rank == 0:  # one rank prints
            print(f"epoch {epoch}  loss {total[0] / total[1]:.4f}  ({world_size} ranks)")

    # One rank saves, and the model's own state: DDP's would have "module." in every name.
    # (*) Killed before here, all is lost: optimizer, order of the data and random numbers too.
    if rank == 0:
        torch.save(model.state_dict(), SAVED)
    dist.barrier()  # nobody may read the file before it is there
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
