"""Patches for torch and libraries that do not work with fake tensors or thousands of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

# Patches that make libraries behave on fake tensors as they do in a run.


@contextmanager
def fake_tensor_patches() -> Iterator[None]:
    """Inside, a step on fake tensors does the same as a step of a run."""
    with _samples_are_not_packed(), torchs_own():
        yield


@contextmanager
def torchs_own() -> Iterator[None]:
    """Apply only the patches of torch."""
    with _shapes_worked_out_aside(), _grouped_products():
        yield


@contextmanager
def _samples_are_not_packed() -> Iterator[None]:
    """Make Hugging Face models treat each sample as one sequence.

    They read the values of position ids to detect several sequences packed in one sample. Without
    values they assume packing, create a mask of length × length, and keep more for backward.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = look


@contextmanager
def _shapes_worked_out_aside() -> Iterator[None]:
    """Exclude from traces what DTensor runs only to find output shapes.

    It runs each operation on fake tensors of the full shape. In a run these take no memory and
    almost no time; in a trace they would be counted.
    """
    module: Any = sys.modules.get("torch.distributed.tensor._sharding_prop")
    kind = getattr(module, "ShardingPropagator", None)
    try_out = getattr(kind, "_propagate_tensor_meta_non_cached", None)
    if kind is None or try_out is None:
        yield
        return

    def aside(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return try_out(self, *args, **kwargs)

    kind._propagate_tensor_meta_non_cached = aside  # noqa: SLF001 - no other way
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = try_out  # noqa: SLF001


@contextmanager
def _grouped_products() -> Iterator[None]:
    """Support grouped products in any precision: torch infers shapes for bfloat16 only."""
    from torch._subclasses.fake_impls import op_implementations_dict as known

    operator = torch.ops.aten._grouped_mm.default  # noqa: SLF001 - its only name
    if operator in known:
        yield
        return
    known[operator] = lambda _, __, *args, **kwargs: _grouped(*args, **kwargs)
    try:
        yield
    finally:
        known.pop(operator, None)


def _grouped(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,  # noqa: ARG001 - torch's own name
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a tensor like the result of a grouped product."""
    if left.dim() == 2 and right.dim() == 3:
        shape = [left.shape[0], right.shape[2]]
    elif left.dim() == 3:
        shape = [left.shape[0], left.shape[1], right.shape[-1]]
    else:  # a gradient: columns of the left and rows of the right operand, by group
        groups = 1 if offs is None else offs.shape[0]
        shape = [groups, left.shape[0], right.shape[1]]
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


@contextmanager
def moving_modules() -> Iterator[None]:
    """Make `module.to(…)` create new parameters: fake tensors do not allow swapping contents."""
    original = nn.Module._apply  # noqa: SLF001

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
        for each in module.modules() if recurse else (module,):
            for name, weight in list(each.named_parameters(recurse=False)):
                with torch.no_grad():
                    moved = fn(weight)
                if moved is not weight and weight not in made:
                    made[weight] = nn.Parameter(moved, weight.requires_grad)
                each.register_parameter(name, made.get(weight, weight))
            for name, buffer in list(each.named_buffers(recurse=False)):
                setattr(each, name, fn(buffer))
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]  # noqa: SLF001
