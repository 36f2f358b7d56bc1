"""Access to FSDP2's internals: to time its waits, to reduce gradients, and to rehearse runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.parallel.clock import Waiting

# Times in which a rank waits for FSDP2 to gather weights or to reduce gradients.
#
# On the CPU both calls block and are timed directly. On an accelerator they run on separate
# streams, and the intervals in which the compute stream waits for these are timed.

# renamed in torch 2.13, which warns about the old names
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WAITS = ("wait_for_unshard", "finalize_backward")
"""Methods in which FSDP2 makes the compute stream wait for its other streams."""


def watch(model: nn.Module, waiting: Waiting) -> None:
    """Report each wait to `waiting`."""
    if waiting.is_on_host:
        _time_collectives(model, waiting)
    else:
        _time_waits(model, waiting)


def _time_waits(model: nn.Module, waiting: Waiting) -> None:
    """Wrap FSDP2's wait methods. They are not public; if one is missing, it is not measured."""
    for group in _groups(model):
        for name in _WAITS:
            if hasattr(group, name):
                setattr(group, name, _timed(getattr(group, name), waiting))


def _groups(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that are communicated together.

    Before torch 2.13 there is one per module.
    """
    found: list[Any] = []
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        found += getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
    return [group for group in found if group is not None]


def gathered_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that FSDP2 gathers weights into, by name.

    They are created in the first forward and reused.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for group in _groups(model):
        for part in group.fsdp_params:
            weight, where = getattr(part, "_unsharded_param", None), part._module_info  # noqa: SLF001
            if weight is not None and weight.requires_grad:
                prefix = names.get(id(where.module), "")
                found[f"{prefix}.{where.param_name}".lstrip(".")] = weight
    return found


def reduce_now(model: nn.Module) -> None:
    """Reduce accumulated gradients to shards, as FSDP2 does at the end of a backward.

    Groups are reduced in reverse order of forward, as in backward.
    """
    groups = list(reversed(_groups(model)))
    for group in groups:
        group.post_backward()
    for group in groups:
        group.finalize_backward()


def _timed(wait: Callable[..., Any], waiting: Waiting) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with waiting.around():
            return wait(*args, **kwargs)

    return timed


def _time_collectives(model: nn.Module, waiting: Waiting) -> None:
    """Replace FSDP2's collectives with the same ones plus timing, through its public API."""
    gather, reduce = cast("Any", TimedGather(waiting)), cast("Any", TimedReduceScatter(waiting))
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather"):
            cast("Any", module).set_custom_all_gather(gather)
            cast("Any", module).set_custom_reduce_scatter(reduce)


class _Timed:
    """torch's interface for custom collectives (`Comm`)."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedGather(_Timed):
    """All-gather of weights, timed."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        with self._waiting.around():
            return _GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class TimedReduceScatter(_Timed):
    """Reduce-scatter of gradients, timed."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with self._waiting.around():
            return _REDUCE(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# FSDP2 on one of thousands of simulated ranks.


class _Pieces:
    """Lazy version of torch.chunk's result, padded with empty chunks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        length = self._tensor.shape[self._dim]
        start = min(index * self._size, length)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


@contextmanager
def cutting_one_shard() -> Iterator[None]:
    """Make FSDP2 create only its own shard of a weight.

    Otherwise it creates the shards of all ranks and keeps one, which is slow for thousands.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = vars(_fsdp_param)["_chunk_with_empty"]
    vars(_fsdp_param)["_chunk_with_empty"] = _Pieces
    try:
        yield
    finally:
        vars(_fsdp_param)["_chunk_with_empty"] = original
