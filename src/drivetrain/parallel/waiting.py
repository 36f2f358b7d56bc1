"""Waiting: the seconds in which a rank could do nothing but wait for others.

A collective makes every rank as slow as the slowest, so the time of a step says nothing about whose
fault it is. What counts is how long a rank was at work before it began to wait:

- ddp: from the moment this rank's last gradient is there, until backward returns. What was sent
  before that ran beside the rank's own work and is not waiting.
- fsdp on the CPU: every gather of weights and every reduction of gradients, which block there.
- horovod, bitwise, local_sgd, live: the call that exchanges.

Not measured: tensor, context and pipeline parallelism and DeepSpeed, whose exchanges happen inside
the model or the engine, and devices that work on their own while the host has gone on (CUDA).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain.parallel.ddp import Replicated
from drivetrain.parallel.strategy import Spread

# renamed in torch 2.13, which warns about the old names
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waiting:
    """Adds up; a step takes what there is."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._gradients: LastGradient | None = None

    @classmethod
    def of(cls, spread: Spread, device: torch.device) -> Waiting:
        """Watches what can be watched of a spread."""
        waiting = cls()
        if isinstance(spread, Replicated):
            waiting._gradients = LastGradient(spread.inner.parameters())
        elif device.type == "cpu" and hasattr(spread.inner, "set_custom_all_gather"):
            _time_collectives(spread.inner, waiting)
        return waiting

    def add(self, seconds: float) -> None:
        """So many more."""
        self._seconds += seconds

    @contextmanager
    def around(self) -> Iterator[None]:
        """All that happens within is waiting."""
        began_s = perf_counter()
        yield
        self._seconds += perf_counter() - began_s

    def after_backward(self) -> None:
        """Backward has returned: whatever came after the last gradient was waiting."""
        if self._gradients is not None:
            self._seconds += self._gradients.since()

    def stop_watching(self) -> None:
        """Leave the gradients alone; for those who want to know what watching costs."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class LastGradient:
    """When the last gradient of a backward came in.

    Which one that is shows in the first backward, where all are watched; from then on one hook is
    left, so that a step costs a microsecond.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._at_s = 0.0
        self._last: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._note_first)
            for p in parameters
            if p.requires_grad
        ]

    def since(self) -> float:
        """Seconds since it came; 0 when none has."""
        if not self._at_s:
            return 0.0
        seconds, self._at_s = perf_counter() - self._at_s, 0.0
        if self._last is not None:
            self._settle(self._last)
        return seconds

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _settle(self, last: torch.Tensor) -> None:
        self.close()
        self._handles = [last.register_post_accumulate_grad_hook(self._note)]
        self._last = None

    def _note_first(self, parameter: torch.Tensor) -> None:
        self._last, self._at_s = parameter, perf_counter()

    def _note(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._at_s = perf_counter()


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
