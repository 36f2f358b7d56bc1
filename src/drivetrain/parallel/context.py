"""cp: each rank has a part of every sequence; attention sees all of it.

Keys and values are gathered over the `cp` ranks, queries stay where they are. (torch's own context
parallelism is experimental, and on CPU it is silently wrong; gathering is exact on every device.)
The model is called as ever: what goes in is cut along the sequence, what comes out is put together
again, so that the loss is that of the whole sequence on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import repeated_blocks

_SEQUENCE = 1  # of inputs and outputs; of queries, keys and values it is the last but one
_POSITIONS = "position_ids"
# torch's own, whatever somebody may have put in its place in torch.nn.functional
_ATTENTION = torch._C._nn.scaled_dot_product_attention  # noqa: SLF001 - it has no other name


def share_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a model work on parts of sequences, in place."""
    group = mesh.get_group()
    blocks = repeated_blocks(model)
    problems = []
    if not blocks:
        problems.append(("the model has no repeated blocks", "keep its layers in a ModuleList"))
    if _POSITIONS not in inspect.signature(model.forward).parameters:
        rule = f"{type(model).__name__}.forward() takes no {_POSITIONS}"
        problems.append((rule, "let it: a rank must know where in the sequence its part lies"))
    if problems:
        size = mesh.size()
        raise ConfigError([Problem("parallel.cp", *words, size) for words in problems])
    for block in blocks:  # its forward, so that recomputation does the same again
        block.forward = partial(_attending_to_all, block.forward, mesh)
    model.register_forward_pre_hook(_Cut(group), with_kwargs=True)
    model.register_forward_hook(_PutTogether(group))


def _attending_to_all(
    forward: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> Any:
    with _GatheredAttention(mesh):
        return forward(*args, **kwargs)


class _GatheredAttention(TorchFunctionMode):
    """scaled_dot_product_attention over all parts of the sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

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
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            rule = "attention with a mask of its own cannot be shared"
            raise ConfigError([Problem("parallel.cp", rule, "use causal or full attention")])
        key, value = self._all(key), self._all(value)
        if is_causal:
            first = self._mesh.get_local_rank() * query.shape[-2]
            rows = torch.arange(first, first + query.shape[-2], device=query.device)
            attn_mask = rows[:, None] >= torch.arange(key.shape[-2], device=query.device)
        attended: torch.Tensor = _ATTENTION(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options
        )
        return attended

    def _all(self, part: torch.Tensor) -> torch.Tensor:
        cut = DTensor.from_local(part, self._mesh, [Shard(part.dim() - 2)], run_check=False)
        # every rank's queries have a gradient for all keys and values: they are added up
        return cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _Cut:
    """Each tensor that has the sequence along it is cut; positions are those in the whole."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for name in ("attention_mask", "labels"):
            if kwargs.get(name) is not None:
                rule = f"a model that is given {name} cannot be cut along the sequence"
                raise ConfigError([Problem("parallel.cp", rule, "leave it out", self._size)])
        sequence = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        length = sequence.shape[_SEQUENCE]
        if length % self._size:
            rule = f"a sequence of {length} cannot be shared evenly"
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
    """Outputs of all parts, in order, on every rank."""

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
    """Every rank computes the same loss of the whole, so its own slice of the gradient is all."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        ctx.start, ctx.length = dist.get_rank(group) * part.shape[_SEQUENCE], part.shape[_SEQUENCE]
        return torch.cat(parts, dim=_SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].narrow(_SEQUENCE, ctx.start, ctx.length), None
