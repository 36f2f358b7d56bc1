"""cp: each rank has a part of every sequence, and attention covers the whole sequence.

Keys and values are gathered over the `cp` ranks, queries stay on their rank; no mask is created
(`attention.py`). Backward gathers again, so between forward and backward a rank keeps only its own
part. (torch's own context parallelism is experimental, and on CPU it is silently wrong.)
The model is called as usual: its inputs are split along the sequence and its outputs are gathered,
so every rank computes the loss of the whole sequence.

Parts are consecutive. With causal attention the first rank attends to one part and the last to all:
the last has 2 - 1/cp times the mean attention work, and the other ranks wait for it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.attention import attend_to_parts, attend_to_parts_backward
from drivetrain.parallel.blocks import repeated_blocks

_SEQUENCE = 1  # in inputs and outputs; in queries, keys and values it is the second to last
_POSITIONS = "position_ids"
# torch's own function, even if torch.nn.functional has been patched
_ATTENTION = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001 - it has no other name
# names in newer and older torch
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make a model work on parts of sequences, in place."""
    group = mesh.get_group()
    blocks = repeated_blocks(model)
    problems = []
    if not blocks:
        problems.append(("the model has no repeated blocks", "keep its layers in a ModuleList"))
    if _POSITIONS not in inspect.signature(model.forward).parameters:
        rule = f"{type(model).__name__}.forward() does not take {_POSITIONS}"
        problems.append((rule, "add it: a rank must know the positions of its part"))
    if problems:
        size = mesh.size()
        raise ConfigError([Problem("parallel.cp", *words, size) for words in problems])
    for block in blocks:  # wrap the forward, so that recomputation does the same
        block.forward = partial(_attending_to_all, block.forward, group)
    model.register_forward_pre_hook(_Cut(group), with_kwargs=True)
    model.register_forward_hook(_PutTogether(group))


def _attending_to_all(
    forward: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any
) -> Any:
    with _SharedAttention(group):
        return forward(*args, **kwargs)


class _SharedAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by one over all parts of the sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not _ATTENTION:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002 - implied by the shapes
    ) -> torch.Tensor:
        self._refuse(query, key, attn_mask, dropout_p, is_causal)
        if scale is None:
            scale = 1.0 / math.sqrt(query.shape[-1])
        inputs = [_with_heads(_autocast(x)) for x in (query, key, value)]
        shared: Any = _Attention.apply
        out: torch.Tensor = shared(*inputs, self._group, is_causal, scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _refuse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
    ) -> None:
        problems = []
        if mask is not None:
            rule = "attention with an explicit mask cannot be split over ranks"
            problems.append((rule, "use causal or full attention"))
        if dropout > 0.0:
            rule = f"attention with dropout ({dropout:g}) cannot be split over ranks"
            problems.append((rule, "set the model's attention dropout to 0"))
        if is_causal and query.shape[-2] != key.shape[-2]:
            rule = f"causal attention with {query.shape[-2]} queries and {key.shape[-2]} keys"
            problems.append((rule, "use it only where both belong to one sequence"))
        if problems:
            size = dist.get_world_size(self._group)
            raise ConfigError([Problem("parallel.cp", *words, size) for words in problems])


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast as autocast would: torch's attention computes in autocast's precision."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device))


def _with_heads(x: torch.Tensor) -> torch.Tensor:
    """Return x as batch × heads × length × size."""
    return x if x.dim() == 4 else x.reshape(-1, 1, *x.shape[-2:])


class _Attention(torch.autograd.Function):
    """Attention of a rank's queries to all ranks' keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        ctx.group, ctx.how = group, (dist.get_rank(group) if causal else None, scale)
        out: torch.Tensor
        out, lse = attend_to_parts(query, _stacked(key, group), _stacked(value, group), *ctx.how)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = _stacked(key, ctx.group), _stacked(value, ctx.group)
        to_query, to_keys, to_values = attend_to_parts_backward(
            gradients[0].contiguous(), query, keys, values, out, lse, *ctx.how
        )
        del keys, values  # free them before the reduce-scatter allocates
        to_key = _own_sum(to_keys, ctx.group)
        return to_query, to_key, _own_sum(to_values, ctx.group), None, None, None


def _stacked(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather every rank's part, stacked in order."""
    ranks = dist.get_world_size(group)
    gathered = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
    _all_gather(gathered, part.contiguous(), group=group)
    return gathered.view(ranks, *part.shape)


def _own_sum(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Add up all ranks' gradients for this rank's part (reduce-scatter)."""
    own = torch.empty_like(parts[0])
    _reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


class _Cut:
    """Splits each tensor along the sequence; positions are those in the whole sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for name in ("attention_mask", "labels"):
            if kwargs.get(name) is not None:
                rule = f"inputs with {name} cannot be split along the sequence"
                raise ConfigError([Problem("parallel.cp", rule, "leave it out", self._size)])
        sequence = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        length = sequence.shape[_SEQUENCE]
        if length % self._size:
            rule = f"a sequence of length {length} cannot be split evenly"
            remedy = f"pad sequences to a multiple of {self._size}"
            raise ConfigError([Problem("parallel.cp", rule, remedy, self._size)])
        own = length // self._size
        cut = partial(self._part, length=length, own=own)
        kwargs = {name: cut(value) for name, value in kwargs.items()}
        if kwargs.get(_POSITIONS) is None:
            here = torch.arange(self._rank * own, (self._rank + 1) * own, device=sequence.device)
            kwargs[_POSITIONS] = here.unsqueeze(0)
        return tuple(cut(value) for value in args), kwargs

    def _part(self, value: Any, *, length: int, own: int) -> Any:
        is_sequence = isinstance(value, torch.Tensor) and value.dim() > _SEQUENCE
        if not is_sequence or value.shape[_SEQUENCE] != length:
            return value
        return value.narrow(_SEQUENCE, self._rank * own, own)


class _PutTogether:
    """Gathers the outputs of all parts, in order, on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self._whole(output)
        for name, value in output.items():
            if isinstance(value, torch.Tensor):
                output[name] = self._whole(value)
        return output

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _Gather.apply(part, self._group)  # type: ignore[no-untyped-call]
        return whole


class _Gather(torch.autograd.Function):
    """All-gather whose backward takes the own slice: every rank computes the same whole loss."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.start, ctx.length = dist.get_rank(group) * part.shape[_SEQUENCE], part.shape[_SEQUENCE]
        return torch.cat(parts, dim=_SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].narrow(_SEQUENCE, ctx.start, ctx.length), None
