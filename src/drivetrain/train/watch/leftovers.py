"""Calls that a script kept from its earlier loop although `loop.step()` makes them: refused.

Left in, `optimizer.zero_grad()` discards the gradients before they are used, and `optimizer.step()`
updates the weights twice. Neither fails by itself: the run would train nothing, or something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.parts import own_part
from drivetrain.train.several.optimizers import kind_of, members

_NOT_ZERO_GRAD = "remove optimizer.zero_grad() from the script, loop.step() does that"
_CHANGE_ONCE = (
    "set optimization.max_grad_norm and remove clip_grad_norm_, or change gradients once, after "
    "the last micro-batch and before loop.step()"
)


class WatchedZeroGrad:
    """An optimizer's zero_grad that also notes that it was called."""

    def __init__(self, optimizer: torch.optim.Optimizer, note: Callable[[], None]) -> None:
        before = vars(optimizer).get("zero_grad")
        earlier = before if isinstance(before, WatchedZeroGrad) else None  # of an earlier run
        self.replaced_by: Any = before if earlier is None else earlier.replaced_by
        """What a script had put in place of the method; None: nothing."""
        self.call: Callable[..., Any] = optimizer.zero_grad if earlier is None else earlier.call
        self._note = note

    def __call__(self, *given: Any, **named: Any) -> None:
        self.call(*given, **named)
        self._note()


class Gradients:
    """Whether a step's gradients are still there when they are needed.

    It looks at one weight that had a gradient after backward, and at others only if that one has
    none any more. An engine that keeps gradients elsewhere leaves none to look at.

    Values are read only if the script has called zero_grad, which may fill gradients with zeros
    (set_to_none=False): on a device, reading them makes the host wait.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, spread: ParallelModel) -> None:
        self._optimizer = optimizer
        self._are_elsewhere = spread.engine_step is not None
        self._seen: torch.Tensor | None = None
        """A weight that had a gradient after the last backward."""
        self._seen_version = 0
        """torch's count of the in-place changes of its gradient, after the last backward."""
        self._is_computed = False
        self._may_be_zero = False
        """Whether zero_grad was called since the last backward."""
        for each in {optimizer, *members(optimizer)}:
            vars(each)["zero_grad"] = WatchedZeroGrad(each, self._note_zero_grad)

    def before_backward(self) -> None:
        """ConfigError if the gradients of the step's earlier micro-batches were cleared."""
        if self._are_cleared():
            rule = "those of this step's earlier micro-batches were cleared"
            raise _refusal("gradients", rule, _NOT_ZERO_GRAD)

    def after_backward(self) -> None:
        """Note a weight that has a gradient now."""
        self._is_computed, self._may_be_zero = True, False
        if self._seen is None or self._seen.grad is None:
            self._seen = self._first_with_one()
        self._seen_version = self._version()

    def before_next_micro_batch(self) -> None:
        """ConfigError if the script changed gradients that the next micro-batch is added to."""
        if self._may_be_zero or self._seen is None or self._seen.grad is None:
            return  # perhaps cleared, and looked at before the next backward
        if self._version() != self._seen_version:
            rule = "were changed after a micro-batch that is not the step's last"
            raise _refusal("gradients", rule, _CHANGE_ONCE)

    def before_step(self) -> None:
        """ConfigError if the step's gradients were cleared since backward."""
        if self._are_cleared():
            rule = "no weight has a gradient at loop.step()"
            raise _refusal("gradients", rule, _NOT_ZERO_GRAD)

    def before_update(self) -> None:
        """ConfigError if backward has given no weight a gradient, now that ranks have shared them.

        A strategy may know the cause, and has been asked before.
        """
        if self._is_computed and not self._are_elsewhere and self._first_with_one() is None:
            rule = "depends on no weight of the optimizer, so that loop.step() would change none"
            remedy = "compute it from loop.model, and build the optimizer from model.parameters()"
            raise _refusal("loss", rule, remedy)
        self.forget()

    def forget(self) -> None:
        """Called with each step: the next one has its own gradients."""
        self._seen, self._is_computed, self._may_be_zero = None, False, False
        self._seen_version = 0

    def _version(self) -> int:
        grad = None if self._seen is None else self._seen.grad
        return 0 if grad is None else own_part(grad)._version  # noqa: SLF001 - torch has no other

    def _note_zero_grad(self) -> None:
        self._may_be_zero = self._is_computed

    def _are_cleared(self) -> bool:
        seen = self._seen
        if seen is None:
            return False
        if self._may_be_zero and seen.grad is not None:
            return not any(bool(own_part(grad).any()) for grad in self._all())
        return seen.grad is None and self._first_with_one() is None

    def _all(self) -> Iterator[torch.Tensor]:
        groups = self._optimizer.param_groups
        return (p.grad for group in groups for p in group["params"] if p.grad is not None)

    def _first_with_one(self) -> torch.Tensor | None:
        groups = self._optimizer.param_groups
        return next((p for group in groups for p in group["params"] if p.grad is not None), None)


class Updates:
    """Refuses a step of the run's optimizers that the script makes itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, spread: ParallelModel) -> None:
        self._is_scripts_turn = False
        if spread.engine_step is not None:  # it holds the weights, too
            return
        for each in members(optimizer):
            # one that wraps another optimizer may not have called torch's __init__
            if hasattr(each, "_optimizer_step_pre_hooks"):
                each.register_step_pre_hook(self._refuse)

    @contextmanager
    def scripts_turn(self) -> Iterator[None]:
        """Context of the script's code between two steps."""
        with self._turn(is_scripts=True):
            yield

    @contextmanager
    def runs_turn(self) -> Iterator[None]:
        """Context of the run's own code, called by the script."""
        with self._turn(is_scripts=False):
            yield

    @contextmanager
    def _turn(self, *, is_scripts: bool) -> Iterator[None]:
        before, self._is_scripts_turn = self._is_scripts_turn, is_scripts
        try:
            yield
        finally:
            self._is_scripts_turn = before

    def _refuse(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:  # noqa: ARG002
        if self._is_scripts_turn:
            rule = "is stepped by both the script and the run"
            remedy = "remove optimizer.step() from the script, loop.step() does it"
            raise _refusal("optimizer", rule, remedy, kind_of(optimizer))


def _refusal(where: str, rule: str, remedy: str, value: str | None = None) -> ConfigError:
    return ConfigError([Problem(where, rule, remedy, value, has_value=value is not None)])
