"""Every collective of torch.distributed, and what it does to four small tensors.

    drivetrain train --nproc-per-node 4 examples/collectives.py

Each rank starts with its own tensor; rank 0 prints all of them before and after. To measure how
long each collective takes on your machines, use `drivetrain bench collectives`.
"""

import torch
import torch.distributed as dist


def show(title: str, before: torch.Tensor, after: torch.Tensor | None) -> None:
    """Send all ranks' tensors to rank 0, which prints them."""
    everyones: list[tuple[list[int], list[int] | None]] = [([], None)] * dist.get_world_size()
    mine = before.tolist(), None if after is None else after.tolist()
    dist.all_gather_object(everyones, mine)
    if dist.get_rank() == 0:
        print(f"\n{title}")
        for rank, (held, holds) in enumerate(everyones):
            print(f"  rank {rank}: {held!s:18} -> {'unspecified' if holds is None else holds}")


def main() -> None:
    dist.init_process_group("gloo")  # with GPUs: "nccl", and tensors on each rank's GPU
    rank, n = dist.get_rank(), dist.get_world_size()
    one = torch.tensor([rank + 1])  # 1, 2, 3, 4
    row = torch.arange(n) + 10 * rank  # 0 1 2 3, 10 11 12 13, …

    tensor = row.clone()
    dist.all_reduce(tensor)
    show("all_reduce: the sum of all, on every rank (gradients under ddp)", row, tensor)

    tensor = row.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    show("all_reduce, MAX: the largest, element by element", row, tensor)

    tensor = row.clone()
    dist.reduce(tensor, dst=0)
    show("reduce: the sum, on rank 0 only", row, tensor if rank == 0 else None)

    tensor = row.clone()
    dist.broadcast(tensor, src=2)
    show("broadcast from rank 2: its tensor, on every rank (first weights)", row, tensor)

    parts = [torch.empty_like(one) for _ in range(n)]
    dist.all_gather(parts, one)
    show("all_gather: everybody's, on every rank (weights under fsdp)", one, torch.cat(parts))

    gathered = [torch.empty_like(one) for _ in range(n)] if rank == 0 else None
    dist.gather(one, gathered, dst=0)
    whole = torch.cat(gathered) if gathered else torch.tensor([])
    show("gather: everybody's, on rank 0 only", one, whole)

    tensor = torch.empty_like(one)
    dist.scatter(tensor, list(row.split(1)) if rank == 1 else None, src=1)
    show("scatter from rank 1: its tensor in parts, one for each rank", row, tensor)

    tensor = torch.empty_like(one)
    dist.reduce_scatter(tensor, list(row.split(1)))
    show("reduce_scatter: the sum in parts, one for each rank (gradients under fsdp)", row, tensor)

    tensor = torch.empty_like(row)
    dist.all_to_all_single(tensor, row)
    show("all_to_all: rows become columns (tokens to their experts)", row, tensor)

    tensor = torch.empty_like(one)
    after, before = (rank + 1) % n, (rank - 1) % n
    both = [dist.P2POp(dist.isend, one, after), dist.P2POp(dist.irecv, tensor, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    show("send and recv, around a ring (see point_to_point.py)", one, tensor)

    dist.barrier()  # sends no data: no rank continues before all have arrived
    if rank == 0:
        print("\nbarrier: every rank has come this far")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
