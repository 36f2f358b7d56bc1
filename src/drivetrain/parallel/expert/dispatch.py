"""Token dispatch to experts and back: all-to-all with uneven splits, no tokens dropped.

Each rank holds a part of a layer's experts and has its own tokens. A token's copies, one per chosen
expert, are sorted by expert and sent to the ranks that hold those experts. There the model's own
`forward` runs with the local experts; the results are sent back and summed. There is no padding and
no capacity limit, so the sums are those of one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.expert.finding import Experts
from drivetrain.parallel.parts import own_part


def spread_experts(experts: Sequence[Experts], mesh: DeviceMesh, imbalance: float = 1.0) -> None:
    """Keep this rank's experts of each layer, in place, and dispatch calls over `mesh`."""
    for each in experts:
        _keep_own(each, mesh)
        each.module.forward = Dispatch(each, mesh.get_group(), imbalance)


def is_spread(module: nn.Module) -> bool:
    """True if a module's experts are on several ranks."""
    return isinstance(vars(module).get("forward"), Dispatch)


def _keep_own(experts: Experts, mesh: DeviceMesh) -> None:
    size = experts.count // mesh.size()
    start = mesh.get_local_rank() * size
    for name, weight in experts.module.named_parameters(recurse=False):
        own = weight.detach()[start : start + size]
        own = own if own.device.type == "meta" else own.clone()  # so that the rest is freed
        shared = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(experts.module, name, nn.Parameter(shared, requires_grad=weight.requires_grad))


class Dispatch:
    """Replaces a module's forward: the same results, with experts on several ranks."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup, imbalance: float = 1.0) -> None:
        self.experts = experts
        self._imbalance = imbalance
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._own = experts.count // self._num_ranks
        self._forward = experts.module.forward
        self._signature = inspect.signature(self._forward)
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the sum of the experts' results for each token. A collective call."""
        tokens, chosen, weights = self._signature.bind(*args, **kwargs).args
        self._check_shapes(tokens, chosen, weights)
        if not self._is_checked and not isinstance(tokens, FakeTensor):
            with _disable_current_modes():  # selective recomputation counts operators
                self._check_sums(tokens)
        self._is_checked = True
        num_tokens, num_chosen = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        sent, received = self._counts(chosen)
        to_ranks = [sum(of_rank) for of_rank in sent]
        from_ranks = [sum(of_rank) for of_rank in received]
        there = _travel(tokens[order // num_chosen], to_ranks, from_ranks, self._group)
        scales = _travel(weights.flatten()[order], to_ranks, from_ranks, self._group)
        made = self._compute(there, self._expert_of_each(received, tokens.device), scales)
        back = _travel(made, from_ranks, to_ranks, self._group)
        place = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=order.device)
        )
        summed: torch.Tensor = back[place].view(num_tokens, num_chosen, -1).sum(1)
        return summed

    def _counts(self, chosen: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Return tokens per expert and rank, sent and received; the only host synchronization.

        An index beyond the last expert is an error.
        """
        if isinstance(chosen, FakeTensor):
            return self._assumed_counts(chosen.numel())
        sent = torch.bincount(chosen.flatten(), minlength=self.experts.count)
        if sent.numel() > self.experts.count:
            rule = f"sent a token to expert {sent.numel() - 1} of {self.experts.count}"
            remedy = "count experts from 0"
            raise ConfigError([Problem(self.experts.name, rule, remedy, has_value=False)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        both: list[list[list[int]]] = (
            torch.stack([sent, received]).view(2, self._num_ranks, self._own).tolist()
        )
        return both[0], both[1]

    def _assumed_counts(self, num_sent: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return counts for fake tensors: sent evenly, received with the configured imbalance."""
        each, rest = divmod(num_sent, self.experts.count)
        flat = [each + (expert < rest) for expert in range(self.experts.count)]
        sent = [flat[start : start + self._own] for start in range(0, len(flat), self._own)]
        # the exchange of counts, as in a run
        numbers = torch.zeros(self.experts.count, dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=self._group)
        received = [math.ceil(num_sent * self._imbalance / self.experts.count)] * self._own
        return sent, [received] * self._num_ranks

    def _expert_of_each(self, received: list[list[int]], device: torch.device) -> torch.Tensor:
        """Return which of this rank's experts each received row is for."""
        counts = torch.tensor(received, device=device).flatten()
        own = torch.arange(self._own, device=device).repeat(self._num_ranks)
        return own.repeat_interleave(counts, output_size=sum(map(sum, received)))

    def _compute(
        self, rows: torch.Tensor, expert: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Run the model's own forward, each row with one expert.

        Experts without tokens still get gradients of 0, because other ranks wait for them.
        """
        if len(rows):
            return self._call(rows, expert[:, None], scales[:, None])
        nothing = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        weight = torch.cat([scales, scales.new_zeros(1)])
        return self._call(nothing, expert.new_zeros(1, 1), weight[:, None])[:0]

    def _call(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        with self._own_experts():
            made: torch.Tensor = self._forward(rows, chosen, weights)
        return made

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Make the module one with fewer experts inside the context, by instance attributes."""
        module = self.experts.module
        seen = vars(module)
        weights = dict(module.named_parameters(recurse=False))
        before = seen.get("num_experts")
        try:
            seen.update({name: own_part(weight) for name, weight in weights.items()})
            seen["num_experts"] = self._own
            yield
        finally:
            for name in (*weights, "num_experts"):
                seen.pop(name, None)
            if before is not None:
                seen["num_experts"] = before

    def _check_shapes(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> None:
        fits = tokens.ndim == 2 and chosen.ndim == 2 and chosen.shape == weights.shape
        if not fits or chosen.shape[0] != tokens.shape[0]:
            shapes = ", ".join(str(tuple(each.shape)) for each in (tokens, chosen, weights))
            rule = f"is called with {shapes}, not (tokens, features) and twice (tokens, experts)"
            remedy = "flatten the batch, and pass one weight for each chosen expert"
            raise ConfigError([Problem(self.experts.name, rule, remedy, has_value=False)])

    @torch.no_grad()
    def _check_sums(self, like: torch.Tensor) -> None:
        """Check that a token's result is the sum over its experts, independent of other tokens.

        A forward that normalizes its weights, has a capacity limit or draws random numbers would
        silently train differently when its tokens are dispatched separately.
        """
        num, width = 16, like.shape[1]
        values = torch.arange(num * width, device=like.device).sin().to(like.dtype)
        rows = values.view(num, width)
        first = torch.zeros(num, dtype=torch.int64, device=like.device)
        chosen = torch.stack([first, first + self._own - 1], 1)
        weights = torch.tensor([[0.25, 0.5]], device=like.device).to(like.dtype).expand(num, 2)
        together = self._call(rows, chosen, weights.contiguous())
        apart = torch.zeros_like(together)
        for row in range(num):
            for slot in range(2):
                one = (slice(row, row + 1), slice(slot, slot + 1))
                apart[row] += self._call(rows[row : row + 1], chosen[one], weights[one])[0]
        scale = apart.abs().max().clamp(min=torch.finfo(apart.dtype).tiny)
        allowed = 1e-4 if apart.dtype == torch.float32 else 0.05  # sums in another order
        if not (together - apart).abs().max() <= allowed * scale:
            rule = (
                "gives a token a different result when it gets other tokens as well, or one that "
                "is not the sum of its experts' results"
            )
            remedy = "use top_k_weights unchanged, with no capacity limit and no random numbers"
            raise ConfigError([Problem(self.experts.name, rule, remedy, has_value=False)])


def _travel(
    rows: torch.Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows to their ranks, with gradients. A collective call, in backward as well."""
    received: torch.Tensor = _Exchange.apply(rows, to_ranks, from_ranks, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Sends rows to their ranks; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        to_ranks: list[int],
        from_ranks: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.way_back = (from_ranks, to_ranks, group)
        return exchange(rows, to_ranks, from_ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange(gradient, *ctx.way_back), None, None, None


def exchange(
    rows: torch.Tensor, to_ranks: list[int], from_ranks: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `to_ranks` rows to each rank, in order; return the received rows. Collective."""
    received = rows.new_empty(sum(from_ranks), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), from_ranks, to_ranks, group=group)
    return received
