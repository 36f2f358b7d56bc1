"""The devices of this machine, as a check needs them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from drivetrain.parallel import accelerator
from drivetrain.parallel.accelerator import Accelerator, accelerator_type, num_devices

DEADLINE = "GPU_SMOKE_DEADLINE_S"
"""By time.monotonic(), which all processes of a machine share."""
CUT = "GPU_SMOKE_CUT"
"""Set where the deadline is the end of the ten minutes, and not the check's own limit."""
FOLDER = "GPU_SMOKE_FOLDER"


def backend() -> str:
    """For init_process_group."""
    return Accelerator(torch.device(accelerator_type())).backend


def fits(num_ranks: int) -> bool:
    return num_ranks <= num_devices()


def device_module() -> Any:
    """torch.cuda, torch.xpu, …"""
    return torch.get_device_module(torch.device(accelerator_type()))


def left_s() -> float:
    """Until this check is ended, with time to say why."""
    return max(1.0, float(os.environ[DEADLINE]) - time.monotonic() - 5)


def is_cut() -> bool:
    """Whether what has just failed did so because the ten minutes are over."""
    return CUT in os.environ and left_s() <= 2


def without_accelerator() -> None:
    """The rest of this process trains on the CPU, whichever devices there are."""
    accelerator._type_and_count = lambda: ("cpu", 0)


def without_tf32() -> None:
    """fp32 is fp32. Convolutions are in TF32 by torch's default, whose factors have 10 bits."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def deterministic() -> None:
    """The same numbers in, the same bits out: for runs whose hashes are compared."""
    without_tf32()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True)
