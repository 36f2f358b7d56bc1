"""Evaluation that is exact: every sample once, and the same value at any number of ranks.

Batches are the same at any world size. Their sums are added as fractions, without rounding, so that
neither the order nor the owner of a batch can change a bit; the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
import torch.distributed as dist

from drivetrain.core.blame import blame
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.device import to_device
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.history import EvaluationResult
from drivetrain.train.refusals import check_metrics
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
    """What one rank has seen."""

    means: dict[str, ExactMean] = field(default_factory=dict)
    num_samples: int = 0

    def add(self, values: Mapping[str, Loss], num_samples: int) -> None:
        for name, value in values.items():
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
    module = spread.inner
    was_training = module.training
    module.eval()
    if world.mesh is not None:
        # running statistics are the first copy's, as in the weights that are saved
        for buffer in module.buffers():
            dist.broadcast(buffer, group_src=0, group=world.copies)
    part = _Part()
    try:
        with torch.no_grad(), spread.shown_weights():
            for batch, num_samples in feed.batches(in_lockstep=spread.forwards_in_lockstep):
                values = task.evaluate(spread.evaluated, to_device(batch, world.device))
                check_metrics(values)
                if num_samples and spread.counts:
                    part.add(values, num_samples)
    except Exception as error:
        blame(error, f"the evaluation after step {step}")
        raise
    finally:
        module.train(was_training)
    whole = _over_all_ranks(part, world)
    if not whole.num_samples:  # of a stream it is not known beforehand
        remedy = "give it at least one each time it is read"
        problem = Problem("val", f"has no samples at step {step}", remedy, has_value=False)
        raise ConfigError([problem])
    metrics = {name: mean.value() for name, mean in sorted(whole.means.items())}
    return EvaluationResult(step, metrics, whole.num_samples)


def _over_all_ranks(part: _Part, world: World) -> _Part:
    if world.mesh is None:
        return part
    parts: list[_Part] = [part] * world.layout.world_size
    dist.all_gather_object(parts, part)
    whole = _Part()
    for other in parts:
        whole.merge(other)
    return whole
