"""Plain DistributedDataParallel, every line explained, without Drivetrain.

    examples/launch.sh examples/ddp_template.py 2
    torchrun --nproc-per-node 2 examples/ddp_template.py
    drivetrain train --nproc-per-node 2 examples/ddp_template.py

Comments marked (*) show what you must do yourself here and `Trainer` or `prepare` does for you.
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
    """Run one rank; the launcher starts this program once per rank."""
    # The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which identify
    # this rank. NCCL connects GPUs, gloo connects CPUs.
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # LOCAL_RANK counts ranks on this machine, RANK on all machines; LOCAL_RANK selects the device.
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)

    # Every rank must have the same data in the same order, or the sampler's shares overlap.
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(1000, 20, generator=generator)
    dataset = TensorDataset(pixels, (pixels[:, :10].sum(1) > pixels[:, 10:].sum(1)).long())

    # Each rank reads its own share. If the samples do not divide evenly, the first are repeated so
    # that all ranks make the same number of steps. (*) Drivetrain repeats no sample.
    sampler: DistributedSampler[int] = DistributedSampler(dataset, shuffle=True, seed=SEED)
    loader = DataLoader(dataset, BATCH_PER_RANK, sampler=sampler, pin_memory=has_gpu)

    # The seeds may differ: DDP sends rank 0's weights to all ranks when it wraps the model.
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    spread = DistributedDataParallel(model, device_ids=[local_rank] if has_gpu else None)

    # The optimizer holds the model's own parameters, which DDP does not replace. A step's batch is
    # BATCH_PER_RANK × world_size, so the number of ranks changes the training, and the learning
    # rate may have to change too. (*) With global_batch_size, the training stays the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
        total = torch.zeros(2, device=device)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(spread(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # gradients are averaged over the ranks while this runs
            optimizer.step()  # every rank makes the same step, so the copies stay equal
            total += torch.stack([loss.detach() * len(inputs), torch.ones_like(loss) * len(inputs)])

        # Each rank has its own loss until they are reduced; every rank must call all_reduce.
        dist.all_reduce(total)
        if rank == 0:  # one rank prints
            print(f"epoch {epoch}  loss {total[0] / total[1]:.4f}  ({world_size} ranks)")

    # One rank saves the model's own state dict; DDP's would have "module." in every name.
    # (*) If killed before this line, everything is lost, including optimizer and data order.
    if rank == 0:
        torch.save(model.state_dict(), SAVED)
    dist.barrier()  # no rank may read the file before it exists
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
