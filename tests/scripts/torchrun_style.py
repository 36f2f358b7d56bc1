"""A script as people write it for torchrun: nothing of Drivetrain in it."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--value", type=float, default=1.0)
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--kill-rank", type=int, default=-1)
parser.add_argument("rest", nargs="*")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.tensor([args.value * (rank + 1)])
dist.all_reduce(tensor)
if rank == args.fail_rank:
    raise ValueError(f"rank {rank} has had enough")
if rank == args.kill_rank:
    os.kill(os.getpid(), 9)
dist.all_reduce(tensor)
if rank == 0:
    print("sum", tensor.item(), "rest", args.rest, "threads", torch.get_num_threads(), flush=True)
dist.destroy_process_group()
