"""A DDP-wrapped model gets what `communication` asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config.schema import Communication
from drivetrain.strategies.ddp.communication.auto import Trial, begins_at_once, measure_wire
from drivetrain.strategies.ddp.communication.choose import compressor_for
from drivetrain.strategies.ddp.communication.compressor import Compressor, install
from drivetrain.strategies.ddp.communication.half import Plain


@dataclass(frozen=True)
class Installed:
    """What was put in, and why where that was for us to choose."""

    compressor: Compressor | None = None
    """None: torch's own all-reduce, with nothing in between."""
    why_none: str = ""
    """Why auto left it at that."""
    note: str = ""


def install_compression(
    config: Communication, wrapped: DistributedDataParallel, device: torch.device
) -> Installed:
    """Register the hook, if one is asked for. A collective call with auto."""
    if config.compression == "none":
        return Installed()
    group = wrapped.process_group
    if config.compression != "auto":
        compressor = compressor_for(config.compression, config, group)
        install(compressor, wrapped)
        return Installed(compressor)
    size = sum(p.numel() * p.element_size() for p in wrapped.parameters() if p.requires_grad)
    wire = measure_wire(config, size, group, device)
    best = wire.best()
    if best == "none":
        return Installed(why_none=f"the gradients would take: {wire}")
    candidate = begins_at_once(best, config, group)
    trial = Trial(Plain(group), candidate, wire.saved_s(best), device)
    install(trial, wrapped)
    return Installed(trial, note=f"communication: {best} is on trial; on the wire: {wire}")
