"""bitwise: data parallelism whose weights do not depend on the number of ranks, to the last bit."""

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

# Adding n things up in one fixed order, whoever holds which of them.
#
# Floating-point addition is not associative, so a sum's bits depend on its order. Here the order is
# a balanced binary tree over indices 0 … n - 1, and a holder of neighbouring indices can add up
# whole subtrees alone: the pieces it ends with are nodes of the tree, wherever the cuts lie.

Span = tuple[int, int]
"""Half-open: (2, 4) covers indices 2 and 3."""


class _Addable(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=_Addable)


class TreeAccumulator(Generic[T]):
    """Takes indices in ascending order; merges two neighbours once they are one node's halves."""

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
        """The pieces, in order; the accumulator is empty afterwards."""
        pieces, self._pieces = self._pieces, []
        return pieces


def _are_halves(left: Span, right: Span) -> bool:
    size = left[1] - left[0]
    return size == right[1] - right[0] and left[1] == right[0] and left[0] % (2 * size) == 0


def pieces_of(start: int, stop: int) -> list[Span]:
    """The pieces a holder of start … stop - 1 ends with."""
    spans: list[Span] = []
    for index in range(start, stop):
        span = (index, index + 1)
        while spans and _are_halves(spans[-1], span):
            span = (spans.pop()[0], span[1])
        spans.append(span)
    return spans


def tree_sum(pieces: Mapping[Span, T], start: int, stop: int) -> T:
    """The sum over start … stop - 1, in tree order, from pieces that are nodes of the tree."""
    if (start, stop) in pieces:
        return pieces[start, stop]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return tree_sum(pieces, start, start + half) + tree_sum(pieces, start + half, stop)


# bitwise: data parallelism whose weights do not depend on the number of ranks, to the last bit.
#
# Each micro-batch's gradient is kept apart and added in the order of a fixed tree over micro-batch
# indices (`tree_sum`). Ranks exchange the tree's pieces by all-to-all, each adds up its own slice
# of the flat gradient, and an all-gather brings the slices together: as many bytes as a ring all-
# reduce when the ranks divide the micro-batches evenly into powers of two, a few pieces more when
# not.

# torch 2.13 renamed it, and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BitwiseStrategy(DDPStrategy):
    """ddp's costs and problems; its own way of adding gradients."""

    def __init__(self, config: DDP, blocks: list[range]) -> None:
        super().__init__(config)
        self._blocks = blocks

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Gradients are added in one flat fp32 vector."""
        found = super().problems(profile, layout, cluster)
        if profile.dtypes - {"float32"}:
            names = ", ".join(sorted(profile.dtypes))
            found.append(
                Problem(
                    "reproducibility",
                    f"the same bits are only kept for fp32 weights, and the model has {names}",
                    "make the model in fp32 (precision.dtype sets what it computes in)",
                    "bitwise",
                )
            )
        return found

    def notes(self, model: nn.Module, world: World) -> list[str]:
        """What cannot be vouched for."""
        return [f"not covered by reproducibility=bitwise: {gap}" for gap in uncovered(model)]

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Leave the model as it is; the ranks start from the same seeded weights."""
        return FixedOrderModel(model.to(world.device), world, self._blocks)

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """Gradients of all that a backward passes go into one tree."""
        raise ConfigError([ONE_MODEL])


class FixedOrderModel(SingleModel):
    """A whole model per rank, gradients added in the tree's order."""

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
        """Gradients of this micro-batch go to a buffer of their own, then into the tree."""
        self._skip_to(index)
        leaf = torch.zeros_like(self._template)
        self._point_gradients_at(leaf)
        yield
        self._tree.add(index, leaf)
        self._next = index + 1

    def finish_gradients(self) -> None:
        """Exchange pieces, add them up in order, and give every rank the result."""
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
        """Micro-batches without samples (a short last batch) are leaves of zeros."""
        for empty in range(self._next, index):
            self._tree.add(empty, torch.zeros_like(self._template))
        self._next = index

    def _exchange(self, pieces: list[tuple[Span, torch.Tensor]]) -> dict[Span, torch.Tensor]:
        """My slice of every rank's pieces."""
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


def uncovered(model: nn.Module) -> list[str]:
    """What `reproducibility: bitwise` cannot vouch for in this model."""
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
