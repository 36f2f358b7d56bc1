"""The device a rank of a benchmark trains on: the first that torch has, or the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.parallel.accelerator import Accelerator, accelerator_of, use_device_of


@cache
def own_accelerator() -> Accelerator:
    """This rank's; made the current one when first asked for."""
    return accelerator_of(use_device_of(int(os.environ.get("LOCAL_RANK", "0"))))


def meet() -> None:
    """The other ranks, over the backend of the device."""
    dist.init_process_group(own_accelerator().backend)


def on_device(batches: Iterator[Any]) -> Iterator[list[torch.Tensor]]:
    """The same batches, copied as torch's tutorials do it."""
    accelerator = own_accelerator()
    if accelerator.is_cpu:
        yield from batches
        return
    for batch in batches:
        yield [tensor.to(accelerator.device, non_blocking=True) for tensor in batch]
