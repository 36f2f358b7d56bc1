"""What `bench start` starts: any torchrun script; it says when its first line ran."""

import time

FIRST_LINE_S = time.monotonic()

import os  # noqa: E402 - the first line comes first
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
ready_s = time.monotonic()
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{FIRST_LINE_S} {ready_s}")
dist.barrier()
dist.destroy_process_group()
