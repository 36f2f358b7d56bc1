"""Model FLOPs utilisation (MFU): the share of the devices' peak that a run uses.

It counts 6 operations per weight and token (forward and backward of dense layers; the additional
operations of attention over long sequences are left out), relative to the devices' 16-bit peak. It
needs counted tokens and a known device, so it is not available on a CPU. Not yet run on a GPU.
"""

from __future__ import annotations

from torch import nn

from drivetrain.cluster.catalogue import peak_flops
from drivetrain.train.assemble import Assembly

_FLOPS_PER_WEIGHT_AND_TOKEN = 6


def tokens_per_s_at_peak(assembly: Assembly) -> float | None:
    """Return the tokens per second of all devices at their peak; None if unknown."""
    world = assembly.world
    peak = peak_flops(world.accelerator.name)
    if peak is None or world.layout.pp > 1:  # a stage's rank does not have all the weights
        return None
    weights = num_weights(assembly.engine.spread.inner)
    return peak * world.identity.world_size / (_FLOPS_PER_WEIGHT_AND_TOKEN * weights)


def num_weights(model: nn.Module) -> int:
    """Return the whole model's weights; ZeRO-3 keeps the size of partitioned ones in ds_numel."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def unknown_peak(assembly: Assembly) -> str:
    """Return why utilisation is not recorded; empty if it is, or on a CPU."""
    accelerator = assembly.world.accelerator
    if accelerator.is_cpu or peak_flops(accelerator.name) is not None:
        return ""
    return f"throughput/device/mfu is not recorded: the peak of {accelerator.name!r} is not known"
