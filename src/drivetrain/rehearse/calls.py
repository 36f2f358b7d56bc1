"""What ranks say to each other: collectives as values, read off torch's own operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from drivetrain.rehearse.lines import Line

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
PAIRWISE = frozenset({"send", "recv"})
# torch has several operators for the same thing; the first whose beginning matches
_WORDS = (
    ("_allgather_base_", "all_gather"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("_reduce_scatter_base_", "reduce_scatter"),
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("shard_dim_alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("send", "send"),
    ("isend", "send"),
    ("recv", "recv"),
    ("irecv", "recv"),
    ("monitored_barrier", "barrier"),
    ("barrier", "barrier"),
)


@dataclass(frozen=True)
class Call:
    """One rank's part in one collective."""

    name: str
    num_bytes: int
    """Of the whole: what a gather gives, what a reduce-scatter is given; otherwise the tensor."""
    dtype: str
    ranks: tuple[int, ...]
    peer: int | None = None
    """The other rank of a send or receive."""
    line: Line | None = None

    @property
    def shape(self) -> tuple[str, int, str]:
        """What must be the same on every rank of the group."""
        return self.name, self.num_bytes, self.dtype


def name_of(func: Any) -> str | None:
    """The collective that an operator is; None for those that are none (waiting)."""
    operator = func._schema.name.partition("::")[2]  # noqa: SLF001 - torch's name for it
    return next((word for start, word in _WORDS if operator.startswith(start)), None)


def group_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group among an operator's arguments: boxed, or by its name."""
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)  # noqa: SLF001
    if "process_group" in values:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(values["process_group"])
        return group
    named: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(  # noqa: SLF001
        values["group_name"]
    )
    return named


@cache
def _ranks_of(group_name: Any) -> tuple[int, ...]:
    """One tuple per group: thousands of calls share it."""
    group = torch._C._distributed_c10d._resolve_process_group(group_name)  # noqa: SLF001
    return tuple(dist.get_process_group_ranks(group))


def describe(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, line: Line | None
) -> Call | None:
    """The call that an operator makes; None when it makes none."""
    name = name_of(func)
    if name is None:
        return None
    ranks = _ranks_of(group_of(func, args, kwargs).group_name)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    counted = _counted(name, tensors, made, len(ranks))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    peer = ranks[args[2]] if name in PAIRWISE and isinstance(args[2], int) else None
    return Call(name, counted, dtype, ranks, peer, line)


def _counted(
    name: str, tensors: list[torch.Tensor], made: list[torch.Tensor], num_ranks: int
) -> int:
    """Parts and the whole are both among the arguments of some operators: the whole counts."""
    if not tensors:
        return 0
    if name in ("all_gather", "gather"):
        smallest = min(_bytes(tensor) for tensor in (*tensors, *made))
        return smallest * num_ranks
    if name in ("reduce_scatter", "scatter"):
        smallest = min(_bytes(tensor) for tensor in (*tensors, *made))
        return smallest * num_ranks
    if name == "all_to_all":
        return max(_bytes(tensor) for tensor in tensors)
    return sum(_bytes(tensor) for tensor in tensors)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def totals(calls: Iterable[Call]) -> dict[tuple[str, int], tuple[int, int]]:
    """By name and number of ranks: how many, and their bytes."""
    summed: dict[tuple[str, int], tuple[int, int]] = {}
    for call in calls:
        key = (call.name, len(call.ranks))
        count, size = summed.get(key, (0, 0))
        summed[key] = (count + 1, size + call.num_bytes)
    return summed
