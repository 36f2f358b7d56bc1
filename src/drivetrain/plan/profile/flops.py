"""Floating-point operations of one operation, by torch's own formulas and one of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Two per multiplication and addition; 0 for whatever is no product."""
    name = func._schema.name  # noqa: SLF001 - its only public spelling
    if name == _CPU_ATTENTION:  # torch counts the CUDA kernels only
        return float(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if name == f"{_CPU_ATTENTION}_backward":
        grad, query, key, value = (tensor.shape for tensor in args[:4])
        return float(sdpa_backward_flop_count(grad, query, key, value))
    formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as the registry is keyed
    if formula is None or any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))
