"""bitwise: data parallelism whose weights are bit-identical for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.cluster.description import Cluster
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.ddp.strategy import DDPStrategy
from drivetrain.strategies.single import SingleModel
from drivetrain.strategies.strategy import ONE_MODEL, Profile

# A sum of n values in one fixed order, however they are distributed over ranks.
#
# Floating-point addition is not associative, so a sum's bits depend on its order. Here the order is
# a balanced binary tree over indices 0 … n - 1. A rank that holds neighbouring indices can add up
# whole subtrees alone: its remaining pieces are nodes of the tree, wherever its range starts and
# ends.

Span = tuple[int, int]
"""Half-open: (2, 4) covers indices 2 and 3."""


class _Addable(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=_Addable)


class TreeAccumulator(Generic[T]):
    """Sum values by index, in ascending order; neighbours that form one tree node are merged."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Span, T]] = []

    def add(self, index: int, value: T) -> None:
        """Add the leaf at `index`."""
        span = (index, index + 1)
        while self._pieces and _are_halves(self._pieces[-1][0], span):
            left_span, left = self._pieces.pop()
            value = left + value
            span = (left_span[0], span[1])
        self._pieces.append((span, value))

    def take(self) -> list[tuple[Span, T]]:
        """Return the pieces in order and empty the accumulator."""
        pieces, self._pieces = self._pieces, []
        return pieces


def _are_halves(left: Span, right: Span) -> bool:
    size = left[1] - left[0]
    return size == right[1] - right[0] and left[1] == right[0] and left[0] % (2 * size) == 0


def pieces_of(start: int, stop: int) -> list[Span]:
    """Return the pieces that remain for a rank that holds start … stop - 1."""
    spans: list[Span] = []
    for index in range(start, stop):
        span = (index, index + 1)
        while spans and _are_halves(spans[-1], span):
            span = (spans.pop()[0], span[1])
        spans.append(span)
    return spans


def tree_sum(pieces: Mapping[Span, T], start: int, stop: int) -> T:
    """Return the sum over start … stop - 1 in tree order, from pieces that are tree nodes."""
    if (start, stop) in pieces:
        return pieces[start, stop]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return tree_sum(pieces, start, start + half) + tree_sum(pieces, start + half, stop)


# Data parallelism whose weights are bit-identical for any number of ranks.
#
# Each micro-batch's gradient is kept separately and added in the order of a fixed tree over micro-
# batch indices (`tree_sum`). Ranks exchange the tree's pieces by all-to-all, each rank adds up its
# own slice of the flat gradient, and an all-gather combines the slices. This sends as many bytes as
# a ring all-reduce when the ranks divide the micro-batches evenly into powers of two, and a few
# pieces more otherwise.

# torch 2.13 renamed this function and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BitwiseStrategy(DDPStrategy):
    """Costs and problems as for ddp, but gradients are added in a fixed order."""

    def __init__(self, config: DDP, blocks: list[range]) -> None:
        super().__init__(config)
        self._blocks = blocks

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Return ddp's problems, and one if weights are not fp32: gradients are added in fp32."""
        found = super().problems(profile, layout, cluster)
        if profile.dtypes - {"float32"}:
            names = ", ".join(sorted(profile.dtypes))
            found.append(
                Problem(
                    "reproducibility",
                    f"requires fp32 weights, and the model has {names}",
                    "create the model in fp32 (precision.dtype sets the compute precision)",
                    "bitwise",
                )
            )
        return found

    def notes(self, model: nn.Module, world: World) -> list[str]:
        """Return what the bitwise guarantee does not cover."""
        return [f"not covered by reproducibility=bitwise: {gap}" for gap in uncovered(model)]

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Leave the model unchanged; all ranks start from the same seeded weights."""
        return FixedOrderModel(model.to(world.device), world, self._blocks)

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """Not supported: one tree sums all gradients of a backward."""
        raise ConfigError([ONE_MODEL])


class FixedOrderModel(SingleModel):
    """A full model per rank, with gradients added in the tree's order."""

    can_replay = False

    def __init__(self, model: nn.Module, world: World, blocks: list[range]) -> None:
        super().__init__(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._rank = world.dp_index
        self._num_ranks = world.layout.dp
        self._num_leaves = max(block.stop for block in blocks)
        self._spans = [pieces_of(block.start, block.stop) for block in blocks]
        self._next = blocks[self._rank].start
        self._first = self._next
        self._stop = blocks[self._rank].stop
        numel = sum(p.numel() for p in self._parameters)
        self._slice = -(-numel // self._num_ranks)
        self._template = torch.zeros(
            self._slice * self._num_ranks, dtype=torch.float32, device=world.device
        )
        self._tree: TreeAccumulator[torch.Tensor] = TreeAccumulator()

    @contextmanager
    def micro_batch(self, index: int, *, is_last: bool) -> Iterator[None]:
        """Collect this micro-batch's gradients in a separate buffer, then add it to the tree."""
        self._skip_to(index)
        leaf = torch.zeros_like(self._template)
        self._point_gradients_at(leaf)
        first = self._parameters[0].grad
        yield
        if self._parameters[0].grad is not first:
            raise _cleared()
        self._tree.add(index, leaf)
        self._next = index + 1

    def finish_gradients(self) -> None:
        """Exchange pieces, add them up in order, and give all ranks the result."""
        self._skip_to(self._stop)
        self._next = self._first
        pieces = self._tree.take()
        if self._num_ranks == 1:
            total = tree_sum(dict(pieces), 0, self._num_leaves)
        else:
            mine = tree_sum(self._exchange(pieces), 0, self._num_leaves)
            total = torch.empty_like(self._template)
            _all_gather(total, mine)
        self._point_gradients_at(total)

    def _skip_to(self, index: int) -> None:
        """Add leaves of zeros for micro-batches without samples (of a short last batch)."""
        for empty in range(self._next, index):
            self._tree.add(empty, torch.zeros_like(self._template))
        self._next = index

    def _exchange(self, pieces: list[tuple[Span, torch.Tensor]]) -> dict[Span, torch.Tensor]:
        """Return this rank's slice of every rank's pieces."""
        width = self._slice
        num_mine = len(pieces)
        if num_mine == 1:
            outgoing = pieces[0][1]
        elif num_mine:
            stacked = torch.stack([value.view(self._num_ranks, width) for _, value in pieces], 1)
            outgoing = stacked.reshape(-1)
        else:
            outgoing = self._template[:0]
        counts = [len(spans) for spans in self._spans]
        incoming = torch.empty(sum(counts) * width, device=outgoing.device)
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[count * width for count in counts],
            input_split_sizes=[num_mine * width] * self._num_ranks,
        )
        spans = [span for rank_spans in self._spans for span in rank_spans]
        return dict(zip(spans, incoming.view(-1, width), strict=True))

    def _point_gradients_at(self, flat: torch.Tensor) -> None:
        offset = 0
        for parameter in self._parameters:
            end = offset + parameter.numel()
            parameter.grad = flat[offset:end].view_as(parameter)
            offset = end


def _cleared() -> ConfigError:
    rule = "a micro-batch's were cleared or replaced, and reproducibility=bitwise adds them up"
    remedy = "remove zero_grad() from the script: gradients are cleared after each step"
    return ConfigError([Problem("gradients", rule, remedy, has_value=False)])


def uncovered(model: nn.Module) -> list[str]:
    """Return what `reproducibility: bitwise` cannot guarantee for this model."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    ]
    if not norms:
        return []
    shown = ", ".join(norms[:3]) + (", …" if len(norms) > 3 else "")
    return [
        f"running statistics of {len(norms)} batch-norm layers ({shown}): each rank sees only its "
        "own micro-batches; use group or layer norm, or freeze the statistics"
    ]
