"""How much of the devices' arithmetic a run could use: model FLOPs utilisation.

6 operations per weight and token (forward and backward of dense layers; attention over long
sequences is more, and is left out), against what the devices can do in 16 bit. Only where tokens
are counted and the device is known: not on a CPU. Not yet run on a GPU.
"""

from __future__ import annotations

from torch import nn

from drivetrain.cluster.catalogue import peak_flops
from drivetrain.train.assemble import Assembly

_FLOPS_PER_WEIGHT_AND_TOKEN = 6


def tokens_per_s_at_peak(assembly: Assembly) -> float | None:
    """What all devices together would do at full use; None when that cannot be said."""
    world = assembly.world
    peak = peak_flops(world.accelerator.name)
    if peak is None or world.layout.pp > 1:  # a stage's rank does not have all the weights
        return None
    weights = num_weights(assembly.engine.spread.inner)
    return peak * world.identity.world_size / (_FLOPS_PER_WEIGHT_AND_TOKEN * weights)


def num_weights(model: nn.Module) -> int:
    """Of the whole model: a weight that ZeRO-3 has partitioned is empty, and keeps its size."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def unknown_peak(assembly: Assembly) -> str:
    """Why utilisation is not recorded, to be said once; empty where nobody would expect it."""
    accelerator = assembly.world.accelerator
    if accelerator.is_cpu or peak_flops(accelerator.name) is not None:
        return ""
    return f"throughput/device/mfu is not recorded: the peak of {accelerator.name!r} is not known"
