"""Meter: each step's loss over all ranks, reduced outside the steps.

A step only keeps references to its losses. Every `logging_steps` the open steps are summed over the
ranks in one small all-reduce, so the cost per step does not grow with what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import MicroBatch
from drivetrain.parallel.world import World
from drivetrain.train.history import StepMetrics
from drivetrain.train.task import Loss, Total


class _Part(NamedTuple):
    """A part of one micro-batch's loss: its sum is `value * weight`."""

    value: torch.Tensor
    weight: float
    of: torch.Tensor | float
    """Contribution to the divisor of the sum: samples, or what a Total counts."""


@dataclass(slots=True)
class _Step:
    """This rank's part of one step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Factor that turns each loss into a sum: samples for a mean, 1 for a Total."""
    counts: list[torch.Tensor | int] = field(default_factory=list)
    """Counts of Totals; empty for means."""
    batch_samples: int = 0
    number: int = 0
    learning_rate: float = 0.0
    grad_norm: torch.Tensor | None = None
    global_count: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    """Not 0 if the fp16 scaler skipped the step; None without a scaler."""
    parts: dict[str, list[_Part]] = field(default_factory=dict)
    """Parts of the loss, by name, that the task returns with it."""


class Meter:
    """Collects losses and returns them as StepMetrics."""

    def __init__(self, world: World, *, counts: bool = True) -> None:
        self._world = world
        self._counts = counts
        self._open = _Step()
        self._closed: list[_Step] = []
        self._counts_tokens: bool | None = None
        self._part_names: tuple[str, ...] | None = None
        """None until the ranks have agreed on them, at the first log."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Gradient norm of the current step."""
        return self._open.grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: torch.Tensor) -> None:
        self._open.grad_norm = norm

    def note_scaler(self, found_inf: torch.Tensor) -> None:
        """Note whether the fp16 scaler found infinite gradients in the current step."""
        self._open.found_inf = found_inf

    @property
    def num_losses(self) -> int:
        """Number of losses of the current step so far."""
        return len(self._open.losses)

    def add(self, loss: Loss, micro: MicroBatch) -> None:
        """Add a micro-batch's loss."""
        here = self._open
        counted_before = bool(here.counts) if here.losses else self._counts_tokens
        if counted_before is not None and counted_before != isinstance(loss, Total):
            rule = "is a mean for some batches and a Total for others"
            remedy = "return the same kind for every batch"
            raise ConfigError([Problem("loss", rule, remedy, has_value=False)])
        if isinstance(loss, Total):
            here.losses.append(loss.sum.detach())
            here.weights.append(1.0)
            here.counts.append(loss.count)
        else:
            here.losses.append(loss.detach())
            here.weights.append(float(micro.num_samples))

    def add_parts(self, parts: Mapping[str, Loss | float], micro: MicroBatch) -> None:
        """Add the parts that the task returns with a micro-batch's loss: means or Totals."""
        here = self._open.parts
        for name, part in parts.items():
            value = part.sum if isinstance(part, Total) else part
            weight = 1.0 if isinstance(part, Total) else float(micro.num_samples)
            count = part.count if isinstance(part, Total) else weight
            # one dtype on one device, whatever the task returns, so that all are read at once
            number = torch.as_tensor(value, dtype=torch.float32, device=self._world.device)
            here.setdefault(name, []).append(_Part(number.detach(), weight, count))

    def note_batch(self, micro: MicroBatch) -> None:
        """Note the batch size, also in a step in which this rank has no samples."""
        self._open.batch_samples = micro.batch_samples

    def count_correction(self) -> torch.Tensor | None:
        """Return samples / count over all ranks; None, without communication, if samples count.

        The first loss shows whether the task returns Totals. A rank without samples in the first
        step cannot know, so the ranks exchange it in that step.
        """
        here = self._open
        if self._counts_tokens is None:
            mark = torch.tensor([float(bool(here.counts))], device=self._world.device)
            self._counts_tokens = bool(self._world.sum(mark).item())
        if not self._counts_tokens:
            return None
        count = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for part in here.counts:
            count += part
        if not self._counts:
            count.zero_()
        here.global_count = self._world.sum(count)
        # nothing was counted: the gradients are zero and stay zero
        count = torch.where(here.global_count == 0, 1.0, here.global_count)
        return (here.batch_samples / count).float().squeeze()

    def end_step(self, number: int, learning_rate: float) -> None:
        """Close the current step; `number` counts from 1."""
        here = self._open
        here.number = number
        here.learning_rate = learning_rate
        self._closed.append(here)
        self._open = _Step()

    def collect(self) -> list[StepMetrics]:
        """Return the steps closed since the last call, over all ranks. A collective call."""
        steps, self._closed = self._closed, []
        if not steps:
            return []
        values = iter(_to_floats([loss for step in steps for loss in step.losses]))
        own = [sum(next(values) * weight for weight in step.weights) for step in steps]
        if not self._counts:  # another rank has the same samples
            own = [0.0] * len(own)
        totals, parts = self._world.sum_floats(own), self._sum_parts(steps)
        norms = iter(_to_floats([s.grad_norm for s in steps if s.grad_norm is not None]))
        found = iter(_to_floats([s.found_inf for s in steps if s.found_inf is not None]))
        return [
            _metrics(
                step,
                total,
                None if step.grad_norm is None else next(norms),
                is_skipped=step.found_inf is not None and next(found) > 0,
                parts=of_step,
            )
            for step, total, of_step in zip(steps, totals, parts, strict=True)
        ]

    def _sum_parts(self, steps: Sequence[_Step]) -> list[dict[str, float]]:
        """Return each step's parts of the loss, over all ranks."""
        names = self._agreed_names(tuple(dict.fromkeys(n for step in steps for n in step.parts)))
        if not names:
            return [{} for _ in steps]
        found = [step.parts.get(name, []) for step in steps for name in names]
        values = iter(_to_floats([part.value for parts in found for part in parts]))
        own: list[float] = []
        for parts in found:
            own.append(sum(next(values) * part.weight for part in parts))
            own.append(sum(float(part.of) for part in parts))
        totals = iter(self._world.sum_floats(own if self._counts else [0.0] * len(own)))
        return [{name: next(totals) / (next(totals) or 1.0) for name in names} for _ in steps]

    def _agreed_names(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the parts; at the first log a rank without samples gets them."""
        if self._part_names is None:
            speaker = self._world.first_with(bool(own))
            text = "[]" if speaker is None else self._world.agree(json.dumps(own), speaker)
            self._part_names = tuple(json.loads(text))
        new = [name for name in own if name not in self._part_names]
        if new:
            rule = "appears in the parts of the loss only later, or only on some ranks"
            remedy = "return the same names for every batch"
            raise ConfigError([Problem("loss", rule, remedy, new[0])])
        return self._part_names


def _to_floats(tensors: list[torch.Tensor]) -> list[float]:
    """Read all tensors at once: on a GPU that is one synchronization instead of many."""
    if not tensors:
        return []
    floats: list[float] = torch.stack(tensors).reshape(len(tensors)).tolist()
    return floats


def _metrics(
    step: _Step,
    total: float,
    grad_norm: float | None,
    *,
    is_skipped: bool,
    parts: Mapping[str, float],
) -> StepMetrics:
    count = None if step.global_count is None else float(step.global_count)
    return StepMetrics(
        step=step.number,
        loss=total / (step.batch_samples if count is None else count or 1.0),
        learning_rate=step.learning_rate,
        grad_norm=grad_norm,
        num_samples=step.batch_samples,
        num_tokens=count,
        is_skipped=is_skipped,
        parts=parts,
    )
