"""Precision: autocast for the forward pass and a gradient scaler for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from drivetrain.config.schema import Precision
from drivetrain.parallel.model import COMPUTE_DTYPES


def make_autocast(config: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return a context for the forward pass, entered once per micro-batch; fp32 needs none."""
    dtype = COMPUTE_DTYPES[config.dtype]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def make_scaler(config: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a gradient scaler for fp16, else None."""
    if config.dtype != "fp16":
        return None
    scaler = config.scaler
    return torch.amp.GradScaler(
        device.type,
        init_scale=scaler.init_scale,
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
    )


def found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device
) -> torch.Tensor:
    """Return a tensor that is not 0 if the last step was skipped, without a device sync."""
    found = scaler._found_inf_per_device(optimizer).values()  # noqa: SLF001 - else a sync per step
    return torch.stack([each.to(device, non_blocking=True) for each in found]).sum()
