"""Exact evaluation: every sample once, with the same result at any number of ranks.

Batches are the same at any world size. Their sums are added as fractions, without rounding, so
neither the order nor the rank of a batch can change a bit; the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.errors import ConfigError, Problem, blame
from drivetrain.data.device import to_device
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.parallel.gather import alone
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.history import EvaluationResult
from drivetrain.train.outputs import Collected, PerSample, summarized
from drivetrain.train.refusals import check_kept, check_metrics
from drivetrain.train.task import Loss, Task, Total


@dataclass
class ExactMean:
    """An exact sum and count; a NaN or infinite value makes the mean NaN or infinite."""

    sum: Fraction = Fraction(0)
    count: Fraction = Fraction(0)
    not_finite: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Add a sum over `count` items."""
        if math.isfinite(total):
            self.sum += Fraction(total)
        else:
            self.not_finite += total
        self.count += Fraction(count)

    def merge(self, other: ExactMean) -> None:
        """Add another rank's part."""
        self.sum += other.sum
        self.count += other.count
        self.not_finite += other.not_finite

    def value(self) -> float:
        """Return the mean, rounded once."""
        if self.not_finite != 0.0:
            return self.not_finite
        return float(self.sum / self.count) if self.count else math.nan


@dataclass
class _Part:
    """One rank's sums of metrics and its number of samples."""

    means: dict[str, ExactMean] = field(default_factory=dict)
    num_samples: int = 0

    def add(self, values: Mapping[str, Loss | PerSample | float], num_samples: int) -> None:
        for name, value in values.items():
            if isinstance(value, PerSample):
                continue
            mean = self.means.setdefault(name, ExactMean())
            if isinstance(value, Total):
                mean.add(float(value.sum), float(value.count))
            else:
                mean.add(float(value) * num_samples, num_samples)
        self.num_samples += num_samples

    def merge(self, other: _Part) -> None:
        for name, mean in other.means.items():
            self.means.setdefault(name, ExactMean()).merge(mean)
        self.num_samples += other.num_samples


def evaluate(
    task: Task, spread: ParallelModel, feed: EvaluationFeed, world: World, step: int
) -> EvaluationResult:
    """Evaluate the task on the validation data with all ranks. A collective call."""
    part, outputs = _Part(), Collected()

    def look(turn: int, batch: Any, num_samples: int) -> None:
        values = task.evaluate(spread.evaluated, batch)
        check_metrics(values)
        if num_samples and spread.counts:
            part.add(values, num_samples)
            kept = {name: v.values for name, v in values.items() if isinstance(v, PerSample)}
            check_kept(kept, task)
            if kept:
                outputs.add(turn, kept, num_samples, "metrics")

    try:
        _go_through(spread, feed, world, look)
    except Exception as error:
        blame(error, f"the evaluation after step {step}")
        raise
    whole = _over_all_ranks(part, world)
    if not whole.num_samples:  # not known in advance for a stream
        remedy = "it must yield at least one sample each time it is read"
        problem = Problem("val", f"has no samples at step {step}", remedy, has_value=False)
        raise ConfigError([problem])
    metrics = {name: mean.value() for name, mean in sorted(whole.means.items())}
    if task.summarize is not None:
        metrics |= summarized(task.summarize, outputs.in_order(world), world)
    return EvaluationResult(step, metrics, whole.num_samples)


def predict(
    function: Callable[[nn.Module, Any], Any],
    spread: ParallelModel,
    feed: EvaluationFeed,
    world: World,
) -> Any:
    """Return a function's outputs for every sample, in the data's order, on rank 0. Collective."""
    if feed.is_sharded:
        rule = "each rank reads its own part, so the samples have no common order"
        remedy = "pass a dataset with a length, or a stream that all ranks read (same_stream)"
        raise ConfigError([Problem("predict", rule, remedy, has_value=False)])
    outputs = Collected()

    def look(turn: int, batch: Any, num_samples: int) -> None:
        found = function(spread.evaluated, batch)
        if num_samples and spread.counts:
            outputs.add(turn, found, num_samples, "predict")

    try:
        _go_through(spread, feed, world, look)
    except Exception as error:
        blame(error, "predict")
        raise
    return outputs.in_order(world)


def _go_through(
    spread: ParallelModel,
    feed: EvaluationFeed,
    world: World,
    look: Callable[[int, Any, int], None],
) -> None:
    """Call `look` on this rank's batches, with their turn and number of samples that count."""
    module = spread.inner
    if world.mesh is not None:
        # use the first copy's running statistics, as in the saved weights
        for buffer in module.buffers():
            dist.broadcast(buffer, group_src=0, group=world.copies)
    batches = feed.batches(in_lockstep=spread.forwards_in_lockstep)
    with evaluating(module), torch.no_grad(), spread.shown_weights(), alone():
        for turn, (batch, num_samples) in enumerate(batches):
            look(turn, to_device(batch, world.device), num_samples)


def set_training(module: nn.Module) -> None:
    """Set a model in eval mode to train mode; leave one that is in train mode as it is."""
    if not module.training:
        module.train()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in eval mode; afterwards each submodule's mode is restored."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, was_training in before:
            part.training = was_training


def _over_all_ranks(part: _Part, world: World) -> _Part:
    if world.mesh is None:
        return part
    parts: list[_Part] = [part] * world.layout.world_size
    dist.all_gather_object(parts, part)
    whole = _Part()
    for other in parts:
        whole.merge(other)
    return whole
