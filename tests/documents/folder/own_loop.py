"""A script without Drivetrain in it, as one writes it for torchrun."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def exchange() -> None:
    """Every rank has one number; what each collective makes of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    assert total.item() == sum(range(ranks))
    gathered = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    assert [each.item() for each in gathered] == list(range(ranks))
    first = torch.tensor([7.0 if rank == 0 else 0.0])
    dist.broadcast(first, src=0)
    assert first.item() == 7.0
    if rank == 0:
        dist.send(first, dst=1)
    elif rank == 1:
        dist.recv(first, src=0)


def average(model: nn.Module) -> None:
    """Gradients by hand: all of them on their way at once, then wait."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    for work in [dist.all_reduce(each, async_op=True) for each in gradients]:
        work.wait()
    for each in gradients:
        each.div_(dist.get_world_size())


def train(args: argparse.Namespace) -> float:
    """All of it: sampler, DDP, accumulation, a scaler."""
    torch.manual_seed(0)
    pixels = torch.randn(64, 8)
    dataset = TensorDataset(pixels, (pixels.sum(1) > 0).long())
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    model = nn.Linear(8, 2)
    spread = model if args.overlap else DistributedDataParallel(model, bucket_cap_mb=25)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
    loss = torch.zeros(())
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            with torch.autocast("cpu", torch.float16, enabled=args.amp):
                loss = nn.functional.cross_entropy(spread(inputs), labels) / args.accumulate
            scaler.scale(loss).backward()
            if (index + 1) % args.accumulate == 0:
                if args.overlap:
                    average(model)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--num-epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--accumulate", type=int, default=1)
    for switch in ("--amp", "--overlap", "--collectives"):
        parser.add_argument(switch, action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    exchange() if given.collectives else train(given)
    if dist.get_rank() == 0:
        print(f"DONE on {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()
