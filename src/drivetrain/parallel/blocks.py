"""The repeated blocks of a model: how they are found, and how they are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drivetrain.core.errors import ConfigError, Problem

# The repeated blocks of a model: the units of sharding and recomputation.


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children with weights of the model's outermost ModuleLists, in order."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
            if not is_block:
                visit(child)
            elif next(child.parameters(), None) is not None:
                blocks.append(child)

    visit(model)
    return blocks


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments with the hidden state (the first, or `hidden_states`) changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def blocks_named(model: nn.Module, names: Sequence[str], key: str) -> list[nn.Module]:
    """Return the modules that the config names by class or path; ConfigError if one is missing."""
    # innermost first: an outer module excludes what is already sharded
    places = [(place, module) for place, module in model.named_modules() if module is not model]
    asked = [({place, type(module).__name__}, module) for place, module in reversed(places)]
    found = [module for own, module in asked if own & set(names)]
    missing = set(names).difference(*(own for own, _ in asked))
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(
            [
                Problem(
                    key,
                    "the model has no module of this class or name",
                    f"its classes are {', '.join(known)}",
                    name,
                )
                for name in sorted(missing)
            ]
        )
    return found


# Recomputation (activation checkpointing): blocks store less in forward, and repeat it in backward.
#
# A block's `forward` is replaced, not the block: its name, its hooks and its class stay.

# Expensive to recompute, and small compared with other activations: matrix products and attention,
# on every device. Given by name, because not every torch has all of them.
KEPT = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",  # experts
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
    """Make blocks keep only their input, or (selective) also the results of products."""
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_kept = operator._schema.name in KEPT  # noqa: SLF001 - its only public spelling
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
