"""Trace: run one training step on fake tensors and record the bytes alive after each operation.

Nothing is computed or allocated: fake tensors have only shapes. Each storage is counted once,
however many views it has; weights, buffers and optimizer state exist before and are not counted.
The step is divided into parts (before the repeated blocks, each block, after them), for forward
and backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

# Floating-point operations of one operation, by torch's own formulas and two additional ones.

_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_GROUPED_PRODUCT = "aten::_grouped_mm"


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs: two per multiply-add, and 0 for everything that is not a product."""
    name = func._schema.name  # noqa: SLF001 - its only public spelling
    if name == _CPU_ATTENTION:  # torch counts the CUDA kernels only
        return float(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if name == f"{_CPU_ATTENTION}_backward":
        grad, query, key, value = (tensor.shape for tensor in args[:4])
        return float(sdpa_backward_flop_count(grad, query, key, value))
    if name == _GROUPED_PRODUCT:
        return _grouped_flops(args[0].shape, args[1].shape)
    formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as the registry is keyed
    if formula is None or any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))


def _grouped_flops(left: torch.Size, right: torch.Size) -> float:
    """Return the FLOPs of a grouped product, as used for experts.

    If only one operand has the group dimension, each group multiplies a part of the other.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2.0 * groups * left[-2] * left[-1] * right[-1]


_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


@dataclass
class Span:
    """Operations of one part in one direction, in order."""

    live: list[int] = field(default_factory=list)
    """Bytes alive after each operation without gradients of weights, relative to the step's start.
    """
    gradients: list[int] = field(default_factory=list)
    """Bytes of weights' gradients after each operation."""
    begins_at: int = 0
    """`live` when the part started."""
    flops: float = 0.0
    """FLOPs of products."""
    attention_flops: float = 0.0
    """FLOPs of fused attention, whose products are small."""
    moved_bytes: float = 0.0
    """Bytes read and written by other operations, which are limited by memory bandwidth."""
    curved_bytes: float = 0.0
    """The part of `moved_bytes` by exponentials, roots and means, which a processor computes more
    slowly than it reads memory."""
    num_operations: int = 0
    num_products: int = 0
    exchanged: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Bytes passed to each collective, by (axis, kind), call by call."""


@dataclass
class StepTrace:
    """One step, part by part: 0 is the front, then the blocks, last the back with the loss."""

    forward: list[Span]
    backward: list[Span]
    optimizer: Span = field(default_factory=Span)
    optimizer_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of state per weight, by its position."""
    hand_over_bytes: int = 0
    """Bytes of the hidden state between two blocks."""


class TracedBytes(TorchDispatchMode):
    """Record every operation, and the creation and release of every storage."""

    def __init__(self, known: Sequence[torch.Tensor], num_parts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = StepTrace(
            [Span() for _ in range(num_parts)], [Span() for _ in range(num_parts)]
        )
        self._span = self.trace.forward[0]
        self._live = self._gradients = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._is_gradient: set[int] = set()
        self._ignored = {_key(local) for tensor in known for local in _plain_parts(tensor)}

    def begin(self, span: Span) -> None:
        """Attribute the following operations to `span`."""
        if not span.live:
            span.begins_at = self._live
        self._span = span
        self._note()

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a weight's gradient, which is now complete, as a gradient."""
        if parameter.grad is None:
            return
        for local in _plain_parts(parameter.grad):
            key = _key(local)
            if key in self._sizes and key not in self._is_gradient:
                self._is_gradient.add(key)
                size = self._sizes[key][1]
                self._live -= size
                self._gradients += size
        self._note()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, then count it."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass such as DTensor: its inner operations are seen next
        # waiting returns the collective's own result; on fake tensors it would be a second one
        is_waiting = func._schema.name == _WAITED  # noqa: SLF001 - its only public spelling
        out = args[0] if is_waiting else func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        is_new = [self._see(tensor) for tensor in results]
        span = self._span
        flops = flops_of(func, args, kwargs or {}, out)
        name = func._schema.name  # noqa: SLF001 - its only public spelling
        is_attention = "scaled_dot_product" in name
        if is_attention:
            span.attention_flops += flops
        else:
            span.flops += flops
        if not flops and (any(is_new) or _is_in_place(func)):
            inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            moved = sum(map(_bytes, inputs)) + sum(map(_bytes, results))
            span.moved_bytes += moved
            span.curved_bytes += moved * _is_curved(name)
        span.num_products += bool(flops) and not is_attention
        span.num_operations += bool(flops) or any(is_new) or _is_in_place(func)
        self._note_exchange(func, args)
        self._note(in_hand=_in_hand(func, args))
        return out

    def _note(self, in_hand: int = 0) -> None:
        """Record the bytes alive if they changed.

        Unchanged points are omitted because the number of views depends on the number of tp ranks.
        `in_hand` is temporary memory that the operation has already released.
        """
        span, live = self._span, self._live + in_hand
        if span.live and (span.live[-1], span.gradients[-1]) == (live, self._gradients):
            return
        span.live.append(live)
        span.gradients.append(self._gradients)

    def _note_exchange(self, func: Any, args: tuple[Any, ...]) -> None:
        found = _COLLECTIVES.get(func._schema.name)  # noqa: SLF001 - its only public spelling
        if found is None or not isinstance(args[0], torch.Tensor):
            return
        size = _bytes(args[0])
        if found == _GATHER:
            size *= int(args[1])  # the full tensor
        elif found == _TOKENS_TRAVEL:
            size = max(size, _bytes(args[1]))  # a rank may receive more than it sends
        self._span.exchanged.setdefault(found, []).append(float(size))

    def _see(self, tensor: torch.Tensor) -> bool:
        """Count this tensor's storage if it is new; return whether it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity
        if key in self._ignored or key in self._sizes:
            return False
        size = storage.nbytes()
        self._sizes[key] = (weakref.ref(storage, lambda _: self._gone(key)), size)
        self._live += size
        return True

    def _gone(self, key: int) -> None:
        _, size = self._sizes.pop(key)
        if key in self._is_gradient:
            self._is_gradient.remove(key)
            self._gradients -= size
        else:
            self._live -= size


_GATHER = ("tp", "all_gather")
_TOKENS_TRAVEL = ("ep", "all_to_all")
"""Tokens to their experts and back (`parallel/expert/dispatch.py`)."""
_COLLECTIVES = {
    "_c10d_functional::all_reduce": ("tp", "all_reduce"),
    "_c10d_functional::all_reduce_": ("tp", "all_reduce"),
    "_c10d_functional::all_gather_into_tensor": _GATHER,
    "_c10d_functional::reduce_scatter_tensor": ("tp", "reduce_scatter"),
    "_c10d_functional::all_to_all_single": ("tp", "all_to_all"),
    "c10d::alltoall_base_": _TOKENS_TRAVEL,
}
"""Collectives as (axis, kind); DTensor's calls belong to tp."""


_WEIGHT_OF_CONVOLUTION = {"aten::convolution": 1, "aten::convolution_backward": 2}


def _in_hand(func: Any, args: tuple[Any, ...]) -> int:
    """Return the temporary bytes of an operation.

    Convolution libraries copy weights to their own memory layout; gloo gathers into one buffer and
    copies from there.
    """
    if _COLLECTIVES.get(func._schema.name) == _GATHER:  # noqa: SLF001 - its only public spelling
        return _bytes(args[0]) * int(args[1])
    position = _WEIGHT_OF_CONVOLUTION.get(func._schema.name)  # noqa: SLF001
    return 0 if position is None else _bytes(args[position])


_CURVED = ("gelu", "silu", "softmax", "layer_norm", "rms_norm", "batch_norm", "tanh", "erf", "exp",
           "sigmoid", "sqrt", "pow", "log", "sin", "cos")  # fmt: skip


@cache
def _is_curved(name: str) -> bool:
    return any(word in name for word in _CURVED)


_WAITED = "_c10d_functional::wait_tensor"


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable)  # noqa: SLF001 - its only public spelling


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity
    return key


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor itself, or this rank's part of a DTensor."""
    local = getattr(tensor, "_local_tensor", None)
    return [tensor if local is None else local]


@contextmanager
def following_parts(
    model: nn.Module, blocks: Sequence[nn.Module], seen: TracedBytes
) -> Iterator[None]:
    """Inside, operations are attributed to their parts."""
    handles: list[Any] = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(_enters(index, seen), with_kwargs=True))
    if blocks:
        handles.append(blocks[-1].register_forward_hook(_leaves(len(blocks), seen)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(seen.mark_gradient))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enters(index: int, seen: TracedBytes) -> Callable[..., None]:
    """Return a hook for a block's start; its backward ends with the gradient of its input."""
    trace = seen.trace

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor):
            trace.hand_over_bytes = max(trace.hand_over_bytes, _bytes(hidden))
            if hidden.requires_grad:
                hidden.register_hook(lambda _: seen.begin(trace.backward[index]))
        seen.begin(trace.forward[index + 1])

    return hook


def _leaves(index: int, seen: TracedBytes) -> Callable[..., None]:
    """Return a hook for the last block's end; its backward starts with its output's gradient."""
    trace = seen.trace

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: seen.begin(trace.backward[index]))
        seen.begin(trace.forward[-1])

    return hook
