"""From the config's word for a compressor to the compressor, and what it sends."""

from __future__ import annotations

import torch.distributed as dist

from drivetrain.config.schema import Communication
from drivetrain.strategies.ddp.communication.compressor import Compressor
from drivetrain.strategies.ddp.communication.half import BFloat16, Float16, Plain
from drivetrain.strategies.ddp.communication.topk import TopK


def compressor_for(name: str, config: Communication, group: dist.ProcessGroup) -> Compressor:
    """By its name; `auto` is no compressor but a choice between some."""
    if name == "topk":
        return TopK(config.topk, group)
    if name == "powersgd":
        from drivetrain.strategies.ddp.communication.powersgd import (
            PowerSGD,  # numpy's, and only then
        )

        return PowerSGD(config.powersgd, group)
    return {"none": Plain, "fp16": Float16, "bf16": BFloat16}[name](group)


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """What a rank sends when so many bytes are summed in a ring: each part twice, its own once."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def sent_bytes(config: Communication, gradient_bytes: int, num_ranks: int) -> int:
    """Per rank and step. PowerSGD's depends on the shapes; it and auto send this much at most."""
    ring = ring_bytes(gradient_bytes, num_ranks)
    if config.compression in ("fp16", "bf16"):
        return ring // 2
    if config.compression == "topk":  # a value and its place, to every other rank
        return int(2 * config.topk.ratio * gradient_bytes) * (num_ranks - 1)
    return ring
