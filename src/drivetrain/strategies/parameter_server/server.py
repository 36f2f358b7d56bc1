"""Server: keeps a shard of the weights, with their optimizer state, and takes pushes one at a time.

synchronous: pushes wait until all workers' are there, and are added up in the order of the ranks;
the server's own rank then says by what to multiply the sum (correction and clipping go by all
shards), and everybody gets the new weights.

Otherwise each push is an update of its own, made when it comes. The answer to a worker that is
further ahead of the slowest than the bound is held back until that one has caught up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.strategies.parameter_server.messages import Push, Reply, pack, rows_to_send, unpack

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Rules:
    """How a server goes about pushes."""

    num_workers: int
    is_synchronous: bool
    bound: int | None
    """Steps that a worker may be ahead; None: any number."""
    sparse_rows: bool


class Server:
    """Its methods may be called by the thread that serves others and by the rank's own."""

    def __init__(
        self,
        shard: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        rules: Rules,
        answer: Callable[[int, Reply], None],
    ) -> None:
        self.weights = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in shard]
        self._shard = shard
        self._rules = rules
        self._answer = answer
        self._groups = optimizer.param_groups
        self.optimizer = _on_shard(optimizer, dict(zip(shard, self.weights, strict=True)))
        self.paused = threading.RLock()
        """Held by who needs the shard to stay as it is."""
        self.version = 0
        self._clocks = [0] * rules.num_workers
        self._pushes: dict[int, Push] = {}
        """Of this step (synchronous)."""
        self._held: list[tuple[Push, int]] = []
        """With the staleness: answers that wait for slower workers."""
        self.summed = threading.Event()
        """All pushes of a step are here (synchronous)."""
        self._changed_at = [
            torch.zeros(len(w), dtype=torch.int64) if rules.sparse_rows and w.ndim == 2 else None
            for w in self.weights
        ]
        """The version in which each row of a matrix changed last."""

    def start_from_model(self) -> None:
        """Take the weights from the rank's model: before the first step, or after a load."""
        with self.paused, torch.no_grad():
            for own, parameter in zip(self.weights, self._shard, strict=True):
                own.copy_(parameter)
            self._clocks = [0] * self._rules.num_workers

    def receive(self, push: Push) -> None:
        """One worker's gradients."""
        with self.paused:
            if self._rules.is_synchronous:
                self._pushes[push.worker] = push
                if len(self._pushes) == self._rules.num_workers:
                    self._add_up()
                    self.summed.set()
                return
            staleness = self.version - push.pulled
            if push.gradients is not None:
                self._put_gradients([push])
                self._update(push.rates)
            self._clocks[push.worker] = push.clock
            self._held.append((push, staleness))
            self._answer_those_in_bounds()

    def sum_of_squares(self) -> float:
        """Of the gradients that were added up."""
        norms = [w.grad.float().norm().double() for w in self.weights if w.grad is not None]
        return float(sum(norm**2 for norm in norms))

    def update_all(self, scale: float, rates: Sequence[float]) -> None:
        """Move the weights by the sum of all pushes, and answer every worker."""
        with self.paused:
            self.summed.clear()
            for weight in self.weights:
                if weight.grad is not None and scale != 1.0:
                    weight.grad.mul_(scale)
            self._update(rates)
            pushes, self._pushes = self._pushes, {}
            for push in pushes.values():
                self._answer(push.worker, self._reply(push, staleness=0))

    def _add_up(self) -> None:
        self._put_gradients([push for _, push in sorted(self._pushes.items())])

    def _put_gradients(self, pushes: Sequence[Push]) -> None:
        """What none of them has a gradient for is left alone, as an optimizer does."""
        for push in pushes:
            if push.gradients is None:
                continue
            pieces = unpack(push.gradients, self.weights)
            for weight, piece in zip(self.weights, pieces, strict=True):
                if piece is None:
                    continue
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                if piece.rows is None:
                    weight.grad.add_(piece.values)
                else:
                    weight.grad.index_add_(0, piece.rows, piece.values)

    def _update(self, rates: Sequence[float]) -> None:
        for group, own, rate in zip(self.optimizer.param_groups, self._groups, rates, strict=True):
            # a schedule may change more than the rate: momentum, betas
            group.update({key: value for key, value in own.items() if key != "params"})
            group["lr"] = rate
        self.version += 1
        before = [None if at is None else w.detach().clone() for at, w in self._rows()]
        type(self.optimizer).step(self.optimizer)
        for weight in self.weights:
            weight.grad = None
        for (changed_at, weight), old in zip(self._rows(), before, strict=True):
            if changed_at is not None and old is not None:
                changed_at[(weight.detach() != old).any(1)] = self.version

    def _rows(self) -> list[tuple[torch.Tensor | None, nn.Parameter]]:
        return list(zip(self._changed_at, self.weights, strict=True))

    def _answer_those_in_bounds(self) -> None:
        slowest, bound = min(self._clocks), self._rules.bound
        waiting, self._held = self._held, []
        for push, staleness in waiting:
            if bound is not None and push.clock - slowest > bound:
                self._held.append((push, staleness))
            else:
                self._answer(push.worker, self._reply(push, staleness))

    def _reply(self, push: Push, staleness: int) -> Reply:
        weights = self._packed(push.pulled) if push.wants_weights else None
        return Reply(self.version, staleness, weights)

    def _packed(self, since: int) -> torch.Tensor | None:
        """The weights, or of matrices the rows that have changed since a version."""
        rows = [
            None if at is None else rows_to_send(weight, at > since) for at, weight in self._rows()
        ]
        return pack(self.weights, rows)

    # The optimizer's state, for checkpoints: by the place of a weight in the shard.

    def make_state(self) -> None:
        """Let the optimizer make what it keeps, as in a step that moves nothing; all zeros."""
        with self.paused, torch.no_grad():
            before = [weight.detach().clone() for weight in self.weights]
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            type(self.optimizer).step(self.optimizer)
            for weight, value in zip(self.weights, before, strict=True):
                weight.copy_(value)
                weight.grad = None
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()

    def state_of(self, place: int) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self.weights[place], {})
        return state

    def set_state(self, place: int, state: dict[str, Any]) -> None:
        """All that is kept of one weight; nothing begins anew."""
        self.optimizer.state.pop(self.weights[place], None)
        if state:
            self.optimizer.state[self.weights[place]] = state


def _on_shard(
    optimizer: torch.optim.Optimizer, own: dict[nn.Parameter, nn.Parameter]
) -> torch.optim.Optimizer:
    """The same kind with the same settings, on a server's own copies of its weights.

    Not by making one: nobody but the user knows how.
    """
    held_apart = [
        name
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state") and _holds_parameters(value)
    ]
    if held_apart:
        rule = f"keeps weights in {held_apart[0]}, beside its groups: a server would step others"
        remedy = "use another optimizer, or parallel.strategy=ddp"
        raise ConfigError([Problem("optimizer", rule, remedy, type(optimizer).__name__)])
    made = object.__new__(type(optimizer))
    # a scheduler's own `step` would be that of the optimizer it was made for
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made.param_groups = [
        {**group, "params": [own[p] for p in group["params"] if p in own]}
        for group in optimizer.param_groups
    ]
    made.state = defaultdict(dict)
    return made


def _holds_parameters(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    several = values if isinstance(value, (list, tuple, set, dict)) else [value]
    return any(isinstance(each, nn.Parameter) for each in several)
