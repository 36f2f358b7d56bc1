"""gather: collect the rows of all data-parallel ranks inside a loss, with gradients to each rank.

Every rank's loss is weighted by its share of the global batch, and the gradients of all ranks'
losses are summed. In backward a row therefore gets the sum of its gradients from every rank's loss:
for a loss that all ranks compute from the same rows the shares add up to 1, and the gradient of the
weights equals that of one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.world import World

# torch's function, with a reduce-scatter as its gradient: every backend that runs fsdp has it,
# unlike those of torch.distributed.nn. torch 2.13 renamed it, and warns about the old name
_all_gather = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


class Gathering:
    """Context around forward and backward of one micro-batch, in which `gather` works."""

    def __init__(self, world: World, refusal: Problem | None) -> None:
        self._world = world
        self._refusal = refusal
        """Why nothing can be gathered in this run; None if it can."""
        self._around: AbstractContextManager[None] = nullcontext()
        self._num_samples = self._batch_samples = 1
        self._accumulates = False

    def of(
        self,
        around: AbstractContextManager[None],
        *,
        num_samples: int,
        batch_samples: int,
        is_last: bool,
    ) -> Gathering:
        """Prepare the next micro-batch, with `num_samples` of the global batch's `batch_samples`.

        A micro-batch without samples only keeps ranks in step; its rows are left out.
        """
        self._around = around
        self._num_samples, self._batch_samples = num_samples, batch_samples
        self._accumulates = self._accumulates or not is_last
        return self

    def __enter__(self) -> None:
        _now.turn = self
        self._around.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _now.turn = None
        self._around.__exit__(kind, error, traceback)

    def rows(self, tensor: torch.Tensor, *, allow_accumulation: bool) -> torch.Tensor:
        """Return the rows of all ranks. A collective call."""
        if self._refusal is not None:
            raise ConfigError([self._refusal])
        if self._accumulates and not allow_accumulation:
            raise ConfigError([_ACCUMULATION])
        if self._world.layout.dp == 1:
            return tensor
        tensor = tensor if self._num_samples else tensor[:0]
        group = self._world.copies
        counts = self._counts(len(tensor), group)
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, max(counts) - len(tensor)))
        found = _all_gather(padded.contiguous(), 0, group or _everyone())
        pieces = found.chunk(len(counts))
        return torch.cat([each[:count] for each, count in zip(pieces, counts, strict=True)])

    def _counts(self, own: int, group: dist.ProcessGroup | None) -> list[int]:
        """Return each rank's number of rows, which may differ in the last batch; on the host."""
        world = self._world
        if _now.rows_are_equal:
            return [self._most_rows(own)] * world.layout.dp
        counts = torch.zeros(world.layout.world_size, dtype=torch.int64)
        counts[world.rank] = own
        dist.all_reduce(counts, group=world.host_group)
        ranks = range(world.layout.world_size) if group is None else _members(group)
        return [int(counts[rank]) for rank in ranks]

    def _most_rows(self, own: int) -> int:
        """Return the number of rows of a rank with the most samples."""
        if self._accumulates:
            return own
        samples = -(-self._batch_samples // self._world.layout.dp)
        return own * samples // self._num_samples if own else samples


def _everyone() -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no default process group")
    return group


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


_ACCUMULATION = Problem(
    "gather",
    "a step has several micro-batches (gradient accumulation), so a loss over the global batch "
    "would see only one per rank at a time: fewer negatives, which depend on the number of ranks",
    "give each rank its share in one micro-batch (micro_batch_size = global_batch_size / ranks, or "
    "auto); or accept this with gather(tensor, allow_accumulation=True)",
    has_value=False,
)


@dataclass
class _Now:
    """State of this process."""

    turn: Gathering | None = None
    is_alone: bool = False
    """Whether this rank computes something that other ranks do not."""
    rows_are_equal: bool = False
    """Whether to assume that other ranks, which do not exist, have as many rows."""
    was_alone: bool = False
    """Whether a loss has called `gather` when there were no other ranks."""


_now = _Now()


@contextmanager
def alone() -> Iterator[None]:
    """Wrap code that only this rank runs: an evaluation's batch is already whole."""
    before, _now.is_alone = _now.is_alone, True
    try:
        yield
    finally:
        _now.is_alone = before


@contextmanager
def equal_rows() -> Iterator[None]:
    """Wrap code in which one rank stands in for all: assume equal numbers of rows."""
    before, _now.rows_are_equal = _now.rows_are_equal, True
    try:
        yield
    finally:
        _now.rows_are_equal = before


def gather(tensor: torch.Tensor, *, allow_accumulation: bool = False) -> torch.Tensor:
    """Return the rows of all data-parallel ranks, in the order of the samples, with gradients.

    For losses over the whole global batch (CLIP, SimCLR), in `Task.loss` or in your own loop. All
    ranks must call it equally often. The first dimension is the batch; ranks may have different
    numbers of rows. Compute the loss from the result as if there were one process: a mean over all
    rows is weighted correctly, and so is a mean over this rank's own rows. Gradient accumulation
    changes such a loss, so it is refused unless `allow_accumulation` is set. In an evaluation the
    result is the current batch, because evaluation batches are the same at any number of ranks.
    """
    if isinstance(tensor, DTensor):
        rule = "is already distributed over ranks (a DTensor)"
        raise ConfigError([Problem("gather", rule, "pass a plain tensor", has_value=False)])
    if not tensor.dim():
        rule = "is a scalar, which has no rows"
        remedy = "gather the samples' features; the run averages the loss itself"
        raise ConfigError([Problem("gather", rule, remedy, has_value=False)])
    if _now.is_alone:
        return tensor
    if _now.turn is not None:
        return _now.turn.rows(tensor, allow_accumulation=allow_accumulation)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("call gather() inside a loss: Task.loss, or `for batch in step`")
    _now.was_alone = True
    return tensor


def was_left_out() -> bool:
    """True if this process has computed a loss with `gather` when there were no other ranks."""
    return _now.was_alone
