"""gather: the rows of all data-parallel ranks inside a loss, with gradients back to each of them.

Every rank's loss is weighted by its share of the global batch, and the gradients of all ranks'
losses are added up. In backward a row therefore gets the sum of what every rank's loss wants of it:
for a loss that all ranks compute from the same rows the shares add up to 1, and the weights' own
gradient is that of one process with the whole batch.
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

# torch's own, with a reduce-scatter as its gradient: what every backend has that fsdp runs on,
# unlike torch.distributed.nn's. torch 2.13 renamed it, and warns about the old name
_all_gather = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


class Gathering:
    """Around forward and backward of one micro-batch: what `gather` does meanwhile."""

    def __init__(self, world: World, refusal: Problem | None) -> None:
        self._world = world
        self._refusal = refusal
        """Why nothing can be gathered in this run; None where it can."""
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
        """The next one, with so many samples of the global batch's.

        Without samples it only keeps step, and its rows are left out.
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
        """Those of all ranks. A collective call."""
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
        """Each rank's rows: an epoch's last batch has fewer on some. No device is waited for."""
        world = self._world
        if _now.rows_are_equal:
            return [self._most_rows(own)] * world.layout.dp
        counts = torch.zeros(world.layout.world_size, dtype=torch.int64)
        counts[world.rank] = own
        dist.all_reduce(counts, group=world.host_group)
        ranks = range(world.layout.world_size) if group is None else _members(group)
        return [int(counts[rank]) for rank in ranks]

    def _most_rows(self, own: int) -> int:
        """Those of a rank that has no fewer samples than any other."""
        if self._accumulates:
            return own
        samples = -(-self._batch_samples // self._world.layout.dp)
        return own * samples // self._num_samples if own else samples


def _everyone() -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = dist.group.WORLD
    if group is None:
        raise RuntimeError("ranks that have met are in a group")
    return group


def _members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


_ACCUMULATION = Problem(
    "gather",
    "a step has several micro-batches (gradient accumulation), and a loss over the global batch "
    "would only see one per rank at a time: fewer negatives, and others at another number of ranks",
    "let each rank take its part at once (micro_batch_size = global_batch_size / ranks, or auto); "
    "or accept the smaller loss by name: gather(tensor, allow_accumulation=True)",
    has_value=False,
)


@dataclass
class _Now:
    """What this process is doing."""

    turn: Gathering | None = None
    is_alone: bool = False
    """Whether what is computed is this rank's own affair: others do not compute the same."""
    rows_are_equal: bool = False
    """Whether the others cannot be asked how many rows they have: as many as this one."""
    was_alone: bool = False
    """Whether a loss has asked for the rows of all where there was nobody else."""


_now = _Now()


@contextmanager
def alone() -> Iterator[None]:
    """Around what this rank computes by itself: an evaluation's batch is whole as it is."""
    before, _now.is_alone = _now.is_alone, True
    try:
        yield
    finally:
        _now.is_alone = before


@contextmanager
def equal_rows() -> Iterator[None]:
    """Around what one rank computes for many that are not there: they have as many rows."""
    before, _now.rows_are_equal = _now.rows_are_equal, True
    try:
        yield
    finally:
        _now.rows_are_equal = before


def gather(tensor: torch.Tensor, *, allow_accumulation: bool = False) -> torch.Tensor:
    """The rows of all data-parallel ranks, in the order of the samples, with gradients.

    For losses over the whole global batch (CLIP, SimCLR), in `Task.loss` or in a loop of your own.
    All ranks call it, equally often. The first dimension is the batch's; ranks may have different
    numbers of rows. Compute the loss from what comes back as if there were one process: a mean over
    all rows is weighted correctly, and so is one over this rank's own rows. With gradient
    accumulation such a loss is another one, and is refused unless it is allowed. In an evaluation
    the rows are those of the batch at hand: evaluation's batches are the same at any number of
    ranks.
    """
    if isinstance(tensor, DTensor):
        rule = "is spread over ranks itself (a DTensor)"
        raise ConfigError([Problem("gather", rule, "gather a plain tensor", has_value=False)])
    if not tensor.dim():
        rule = "is a single number, and has no rows"
        remedy = "gather the samples' features; a loss is averaged by the run itself"
        raise ConfigError([Problem("gather", rule, remedy, has_value=False)])
    if _now.is_alone:
        return tensor
    if _now.turn is not None:
        return _now.turn.rows(tensor, allow_accumulation=allow_accumulation)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError("gather() belongs inside a loss: Task.loss, or `for batch in step`")
    _now.was_alone = True
    return tensor


def was_left_out() -> bool:
    """Whether this process has computed a loss that gathers, without ranks to gather from."""
    return _now.was_alone
