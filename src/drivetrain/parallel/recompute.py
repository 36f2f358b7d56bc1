"""Recomputation: blocks keep less of their forward pass, and do it again in backward.

A block's `forward` is replaced, not the block: its name, its hooks and its class stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from drivetrain.parallel.blocks import repeated_blocks

# expensive to do again, and small against what lies between them
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
)


def recompute_blocks(model: nn.Module, how: Literal["selective", "full"]) -> None:
    """Each repeated block keeps only its input, or (selective) also what products gave."""
    options: dict[str, Any] = {}
    if how == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
