"""send and recv: a message between two ranks, and why two that both send first wait forever.

    drivetrain train --nproc-per-node 2 examples/point_to_point.py
    drivetrain train --nproc-per-node 2 --stall-timeout 5 examples/point_to_point.py deadlock

`dist.send` waits until the other side receives; with gloo that is true even for a single number. If
both ranks send before they receive, each waits for a recv that comes after the other's send: a
deadlock. Nothing fails, and torch's default timeout is half an hour. There are three solutions: one
side receives first, the messages are started without waiting (isend, irecv), or both are started
together (batch_isend_irecv).
"""

import sys

import torch
import torch.distributed as dist

NUMBERS = 1 << 22  # 16 MiB


def both_send_first(mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    dist.send(mine, other)  # waits for the other's recv …
    dist.recv(theirs, other)  # … which comes here, after its own send


def one_receives_first(mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    if dist.get_rank() < other:
        dist.send(mine, other)
        dist.recv(theirs, other)
    else:
        dist.recv(theirs, other)
        dist.send(mine, other)


def without_waiting(mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    for work in (dist.isend(mine, other), dist.irecv(theirs, other)):
        assert work is not None  # None only for ranks outside the group
        work.wait()  # do not change `mine` before this


def both_at_once(mine: torch.Tensor, theirs: torch.Tensor, other: int) -> None:
    both = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(both):  # recommended with NCCL; any order
        work.wait()


def main() -> None:
    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    ways = [one_receives_first, without_waiting, both_at_once]
    if sys.argv[1:] == ["deadlock"]:
        ways.append(both_send_first)
    for way in ways:
        mine, theirs = torch.full((NUMBERS,), float(rank + 1)), torch.zeros(NUMBERS)
        way(mine, theirs, other)
        print(f"{way.__name__}: rank {rank} sent {rank + 1}, received {theirs[0]:.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
