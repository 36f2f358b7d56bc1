"""How much of the devices' arithmetic a run could use: model FLOPs utilisation.

6 operations per weight and token (forward and backward of dense layers; attention over long
sequences is more, and is left out), against what the devices can do in 16 bit. Only where tokens
are counted and the device is known: not on a CPU. Not yet run on a GPU.
"""

from __future__ import annotations

import platform

import torch

from drivetrain.cluster.peaks import peak_flops
from drivetrain.train.assemble import Assembly

_FLOPS_PER_WEIGHT_AND_TOKEN = 6


def tokens_per_s_at_peak(assembly: Assembly) -> float | None:
    """What all devices together would do at full use; None when that cannot be said."""
    world = assembly.world
    peak = peak_flops(device_name(world.device))
    if peak is None or world.layout.pp > 1:  # a stage's rank does not have all the weights
        return None
    num_weights = sum(p.numel() for p in assembly.engine.spread.inner.parameters())
    return peak * world.identity.world_size / (_FLOPS_PER_WEIGHT_AND_TOKEN * num_weights)


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"
