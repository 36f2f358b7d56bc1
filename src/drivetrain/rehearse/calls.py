"""The ranks' collectives, and the lines of the user's code that they come from."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

# The user's line in a stack that consists mostly of library frames.

_LIBRARIES = tuple(
    str(Path(place).resolve())
    for place in {
        Path(__file__).parents[1],  # this package
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")),
        *(Path(sysconfig.get_path(name)) for name in ("platlib",)),
    }
)

FIT = "rehearse_fit"
"""The function from which the user's loss and hooks are called."""


@dataclass(frozen=True)
class Line:
    """A line of the user's code."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{shown}:{self.number} in {self.function}: {self.text}"


@cache
def is_users(file: str) -> bool:
    """Whether a file belongs neither to Drivetrain nor to a library."""
    if file.startswith("<"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith(_LIBRARIES) and "site-packages" not in path


def here(skip: int = 1) -> Line | None:
    """Return the innermost line of user code below fit(); None in backward, which has none."""
    frame: FrameType | None = sys._getframe(skip)  # noqa: SLF001 - the documented way to the stack
    while frame is not None and frame.f_code.co_name != FIT:
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def of_error(trace: TracebackType | None) -> Line | None:
    """Return the innermost line of user code in an error's traceback."""
    users = [
        Line(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(trace)
        if is_users(frame.f_code.co_filename)
    ]
    return users[-1] if users else None


def distinct(lines: Iterable[Line | None]) -> list[Line]:
    """Return each line once, in order of appearance."""
    return list(dict.fromkeys(line for line in lines if line is not None))


# Collectives as values, derived from torch's operators.

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
PAIRWISE = frozenset({"send", "recv"})
# torch has several operators for the same collective; the first matching prefix counts
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
class RehearsedCall:
    """One rank's part in one collective."""

    name: str
    num_bytes: int
    """Of a gather, the output; of a reduce-scatter, the input; otherwise the tensor."""
    dtype: str
    ranks: tuple[int, ...]
    peer: int | None = None
    """The other rank of a send or receive."""
    line: Line | None = None

    @property
    def shape(self) -> tuple[str, int, str]:
        """What must match on every rank of the group."""
        return self.name, self.num_bytes, self.dtype


def name_of(func: Any) -> str | None:
    """Return an operator's collective; None for operators that are none, such as waiting."""
    operator = func._schema.name.partition("::")[2]  # noqa: SLF001 - torch's name for it
    return next((word for start, word in _WORDS if operator.startswith(start)), None)


def group_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group in an operator's arguments, which may be boxed or a name."""
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
    """Return a group's ranks; thousands of calls share one tuple."""
    group = torch._C._distributed_c10d._resolve_process_group(group_name)  # noqa: SLF001
    return tuple(dist.get_process_group_ranks(group))


def describe(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, line: Line | None
) -> RehearsedCall | None:
    """Return the collective call of an operator; None if it is not one."""
    name = name_of(func)
    if name is None:
        return None
    ranks = _ranks_of(group_of(func, args, kwargs).group_name)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    counted = _counted(name, tensors, made, len(ranks))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    peer = ranks[args[2]] if name in PAIRWISE and isinstance(args[2], int) else None
    return RehearsedCall(name, counted, dtype, ranks, peer, line)


def _counted(
    name: str, tensors: list[torch.Tensor], made: list[torch.Tensor], num_ranks: int
) -> int:
    """Return the bytes of the whole; some operators have both parts and whole as arguments."""
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


def totals(calls: Iterable[RehearsedCall]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return number of calls and bytes, by name and number of ranks."""
    summed: dict[tuple[str, int], tuple[int, int]] = {}
    for call in calls:
        key = (call.name, len(call.ranks))
        count, size = summed.get(key, (0, 0))
        summed[key] = (count + 1, size + call.num_bytes)
    return summed
