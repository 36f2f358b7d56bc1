"""Evaluation that is exact: every sample once, and the same value at any number of ranks.

Batches are the same at any world size. Their sums are added as fractions, without rounding, so that
neither the order nor the owner of a batch can change a bit; the result is rounded once.
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
    """A sum and a count, both exact; a value that is no number makes the mean none."""

    sum: Fraction = Fraction(0)
    count: Fraction = Fraction(0)
    not_finite: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Add a sum of `count` things."""
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
        """The mean, rounded once."""
        if self.not_finite != 0.0:
            return self.not_finite
        return float(self.sum / self.count) if self.count else math.nan


@dataclass
class _Part:
    """What one rank has seen, and what is added up of it."""

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
    """Go through the validation data with all ranks. A collective call."""
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
    if not whole.num_samples:  # of a stream it is not known beforehand
        remedy = "give it at least one each time it is read"
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
    """What a function makes of every sample, in the data's order, on rank 0. Collective."""
    if feed.is_sharded:
        rule = "ranks read parts of their own, so there is no order of samples to predict in"
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
    """Show `look` this rank's batches, each with its turn and how many samples count."""
    module = spread.inner
    if world.mesh is not None:
        # running statistics are the first copy's, as in the weights that are saved
        for buffer in module.buffers():
            dist.broadcast(buffer, group_src=0, group=world.copies)
    batches = feed.batches(in_lockstep=spread.forwards_in_lockstep)
    with evaluating(module), torch.no_grad(), spread.shown_weights(), alone():
        for turn, (batch, num_samples) in enumerate(batches):
            look(turn, to_device(batch, world.device), num_samples)


def set_training(module: nn.Module) -> None:
    """Train a model that comes in eval mode; in one that trains, leave the parts as they are."""
    if not module.training:
        module.train()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards each part is as it was, and what the user has frozen still is."""
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
