"""Server: keeps a shard of the weights and their optimizer state, and handles pushes one at a time.

synchronous: pushes wait until those of all workers have arrived, and are added up in rank order.
The server's own rank then provides the factor for the sum (correction and clipping depend on all
shards), and all workers get the new weights.

Otherwise each push is a separate update, applied when it arrives. The reply to a worker that is
further ahead of the slowest worker than the bound is delayed until that worker has caught up.
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
    """How a server handles pushes."""

    num_workers: int
    is_synchronous: bool
    bound: int | None
    """Steps that a worker may be ahead; None: any number."""
    sparse_rows: bool


class Server:
    """A shard and its optimizer. Methods are called by the serving thread and the main thread."""

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
        """Held by a thread while the shard must not change."""
        self.version = 0
        self._clocks = [0] * rules.num_workers
        self._pushes: dict[int, Push] = {}
        """Pushes of this step, by worker (synchronous)."""
        self._held: list[tuple[Push, int]] = []
        """Pushes whose replies wait for slower workers, with their staleness."""
        self.summed = threading.Event()
        """Set when all pushes of a step have arrived (synchronous)."""
        self._changed_at = [
            torch.zeros(len(w), dtype=torch.int64) if rules.sparse_rows and w.ndim == 2 else None
            for w in self.weights
        ]
        """The version in which each row of a matrix changed last."""

    def start_from_model(self) -> None:
        """Copy the weights from the rank's model, before the first step or after a load."""
        with self.paused, torch.no_grad():
            for own, parameter in zip(self.weights, self._shard, strict=True):
                own.copy_(parameter)
            self._clocks = [0] * self._rules.num_workers

    def receive(self, push: Push) -> None:
        """Handle one worker's push."""
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
        """Return the squared norm of the summed gradients."""
        norms = [w.grad.float().norm().double() for w in self.weights if w.grad is not None]
        return float(sum(norm**2 for norm in norms))

    def update_all(self, scale: float, rates: Sequence[float]) -> None:
        """Update the weights with the sum of all pushes, and reply to every worker."""
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
        """Add up the pushes' gradients; weights without one keep `grad` None and do not change."""
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
            # a schedule may also change other values, such as momentum or betas
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
        """Return the weights; of matrices, only rows changed since that version if that is less."""
        rows = [
            None if at is None else rows_to_send(weight, at > since) for at, weight in self._rows()
        ]
        return pack(self.weights, rows)

    # The optimizer's state, for checkpoints, by the index of a weight in the shard.

    def make_state(self) -> None:
        """Let the optimizer create its state, with a step that changes no weights; all zeros."""
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
        """Replace the whole state of one weight."""
        self.optimizer.state.pop(self.weights[place], None)
        if state:
            self.optimizer.state[self.weights[place]] = state


def _on_shard(
    optimizer: torch.optim.Optimizer, own: dict[nn.Parameter, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings for a server's own copies of its weights.

    It is created without calling the constructor, whose arguments only the user knows.
    """
    held_apart = [
        name
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state") and _holds_parameters(value)
    ]
    if held_apart:
        rule = f"keeps weights in {held_apart[0]}, outside param_groups, which a server cannot copy"
        remedy = "use another optimizer, or parallel.strategy=ddp"
        raise ConfigError([Problem("optimizer", rule, remedy, type(optimizer).__name__)])
    made = object.__new__(type(optimizer))
    # a scheduler replaces `step` with a wrapper that is bound to the original optimizer
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
