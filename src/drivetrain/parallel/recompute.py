"""Recomputation: blocks keep less of their forward pass, and do it again in backward.

A block's `forward` is replaced, not the block: its name, its hooks and its class stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drivetrain.parallel.blocks import repeated_blocks

# Expensive to do again, and small against what lies between them: products, and attention as every
# device has it. Named, not looked up: not every torch has all of them.
KEPT = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::convolution",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",  # out-of-tree devices
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "drivetrain::attend_to_parts",  # context parallelism
    )
)


def recompute_blocks(model: nn.Module, how: Literal["selective", "full"]) -> None:
    """Each repeated block keeps only its input, or (selective) also what products gave."""
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_kept = operator._schema.name in KEPT  # noqa: SLF001 - its only public spelling
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
