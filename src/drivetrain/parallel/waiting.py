"""Waiting: the stretches of a step in which a rank could do nothing but wait for others.

A collective makes every rank as slow as the slowest, so the time of a step says nothing about whose
fault it is. What counts is how long a rank was at work before it began to wait:

- ddp: from the moment this rank's last gradient is there, until backward returns. What was sent
  before that ran beside the rank's own work and is not waiting.
- fsdp: on the CPU every gather of weights and every reduction of gradients, which block there; on
  an accelerator, where they run on streams of their own, the stretches in which the steps' stream
  waits for them.
- horovod, bitwise, local_sgd, live: the call that exchanges.

Not measured: tensor, context and pipeline parallelism and DeepSpeed, whose exchanges happen inside
the model or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain.parallel.clock import Clock, HostClock, Moment, Stretch
from drivetrain.parallel.ddp import Replicated
from drivetrain.parallel.strategy import Spread

# renamed in torch 2.13, which warns about the old names
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_WAITS = ("wait_for_unshard", "finalize_backward")
"""Where FSDP2 lets the steps' stream wait for its other streams."""


class Waiting:
    """Collects stretches; a step takes what there is."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = HostClock() if clock is None else clock
        self.now: Callable[[], Moment] = self._clock.now
        self._stretches: list[Stretch] = []
        self._gradients: LastGradient | None = None
        self.is_in_step = True
        """Between steps nothing is kept: an evaluation may gather weights a million times."""

    @classmethod
    def of(cls, spread: Spread, clock: Clock) -> Waiting:
        """Watches what can be watched of a spread."""
        waiting = cls(clock)
        if isinstance(spread, Replicated):
            waiting._gradients = LastGradient(spread.inner.parameters(), clock.now)
        elif hasattr(spread.inner, "set_custom_all_gather"):
            watch = _time_collectives if isinstance(clock, HostClock) else _time_waits
            watch(spread.inner, waiting)
        return waiting

    def since(self, began: Moment) -> None:
        """All from that moment to this one was waiting."""
        self._stretches.append((began, self.now()))

    @contextmanager
    def around(self) -> Iterator[None]:
        """All that happens within is waiting."""
        began = self.now() if self.is_in_step else None
        yield
        if began is not None:
            self.since(began)

    def after_backward(self) -> None:
        """Backward has returned: whatever came after the last gradient was waiting."""
        if self._gradients is not None:
            last = self._gradients.take()
            if last is not None:
                self.since(last)

    def stop_watching(self) -> None:
        """Leave the gradients alone; for those who want to know what watching costs."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def take(self) -> list[Stretch]:
        """What there was since the last call."""
        stretches, self._stretches = self._stretches, []
        return stretches


class LastGradient:
    """When the last gradient of a backward came in.

    Which one that is shows in the first backward, where all are watched; from then on one hook is
    left, so that a step costs a microsecond.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], now: Callable[[], Moment]) -> None:
        self._now = now
        self._at: Moment | None = None
        self._last: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._note_first)
            for p in parameters
            if p.requires_grad
        ]

    def take(self) -> Moment | None:
        """That moment; None when no gradient has come."""
        at, self._at = self._at, None
        if at is not None and self._last is not None:
            self._settle(self._last)
        return at

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _settle(self, last: torch.Tensor) -> None:
        self.close()
        self._handles = [last.register_post_accumulate_grad_hook(self._note)]
        self._last = None

    def _note_first(self, parameter: torch.Tensor) -> None:
        self._last, self._at = parameter, self._now()

    def _note(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._at = self._now()


def _time_waits(model: nn.Module, waiting: Waiting) -> None:
    """FSDP2 has no public place for it; where a name is gone, nothing is measured."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in filter(None, groups):
            for name in _WAITS:
                if hasattr(group, name):
                    setattr(group, name, _timed(getattr(group, name), waiting))


def _timed(wait: Callable[..., Any], waiting: Waiting) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with waiting.around():
            return wait(*args, **kwargs)

    return timed


def _time_collectives(model: nn.Module, waiting: Waiting) -> None:
    """FSDP2 lets its collectives be replaced: by the same ones, with a clock beside them."""
    gather, reduce = cast("Any", TimedGather(waiting)), cast("Any", TimedReduceScatter(waiting))
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather"):
            cast("Any", module).set_custom_all_gather(gather)
            cast("Any", module).set_custom_reduce_scatter(reduce)


class _Timed:
    """torch's interface for a collective of one's own (`Comm`)."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedGather(_Timed):
    """Weights, from all their shards."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """As torch's own."""
        with self._waiting.around():
            return _GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class TimedReduceScatter(_Timed):
    """Gradients, to their shards."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """As torch's own."""
        with self._waiting.around():
            return _REDUCE(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
