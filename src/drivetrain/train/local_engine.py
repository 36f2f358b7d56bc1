"""The engine of a rank that trains alone between synchronizations (`LocalSteps`).

Outside the warm-up:

- gradients are this rank's: the mean over its own share of the global batch, by its own count;
- clipping and the gradient norm use them; the reported norm is rank 0's;
- the reported loss is still that of the whole global batch: sums over counts, over all ranks, each
  part computed with its rank's weights. Both are reduced when it is time to log.
"""

from __future__ import annotations

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.parallel.model import LocalSteps, ParallelModel
from drivetrain.parallel.several_models import SeveralModels
from drivetrain.parallel.world import World
from drivetrain.train.engine import Engine
from drivetrain.train.history import StepMetrics
from drivetrain.train.optimization.schedule import LearningRate
from drivetrain.train.several.engine import SeveralEngines, SeveralRates, optimizers_of
from drivetrain.train.watch.meter import Meter


def engine_for(
    config: RunConfig,
    world: World,
    spread: ParallelModel,
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate,
    total_steps: int | None,
) -> Engine:
    """Return the engine for a parallel model."""
    if isinstance(spread, SeveralModels) and isinstance(learning_rate, SeveralRates):
        return SeveralEngines(config, world, spread, optimizers_of(optimizer), learning_rate)
    if spread.local_steps is None:
        return Engine(config, world, spread, optimizer, learning_rate)
    spread.local_steps.ends_at(total_steps)
    return LocalEngine(config, world, spread, spread.local_steps, optimizer, learning_rate)


class LocalEngine(Engine):
    """`Engine` that trains on this rank's share of each step."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        spread: ParallelModel,
        local_steps: LocalSteps,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
    ) -> None:
        super().__init__(config, world, spread, optimizer, learning_rate)
        self.meter: LocalMeter = LocalMeter(world)
        self._local = local_steps

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's last step, where the last round ends too."""
        super().ends_at(total_steps)
        self._local.ends_at(total_steps)

    def complete_gradients(self, step: int) -> None:
        """Reduce over all ranks in the warm-up; afterwards use this rank's own gradients."""
        self.meter.is_alone = self._local.is_alone(step)
        if not self.meter.is_alone:
            with self.waiting.around():
                self._local.sum_gradients()
        super().complete_gradients(step)

    def step(self, step: int) -> None:
        """Update the weights, and synchronize them at the end of a round."""
        if self.meter.is_alone:
            self._local.about_to_move(self.meter.own_count())
        super().step(step)
        if self._local.agrees_after(step):
            with self.waiting.around():
                self._local.agree()


class LocalMeter(Meter):
    """`Meter` for gradients that are divided by this rank's own count."""

    is_alone = True

    def own_count(self) -> torch.Tensor:
        """Return this rank's samples, or its Totals' counts, in the current step, as a tensor."""
        count = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for part in self._open.counts or self._open.weights:
            count += part
        return count

    def count_correction(self) -> torch.Tensor | None:
        """Return batch samples / this rank's count. Sends nothing after the first step."""
        if not self.is_alone or self._counts_tokens is None:
            correction = super().count_correction()
            if not self.is_alone:
                return correction
        here = self._open
        here.global_count = None
        own = self.own_count()
        correction = torch.where(own == 0, 0.0, here.batch_samples / own)
        return correction.float().squeeze()

    def collect(self) -> list[StepMetrics]:
        """Sum the counts over the ranks, as other meters do in each step; then collect."""
        if self._counts_tokens and self._closed:
            own = [float(sum(step.counts)) for step in self._closed]
            totals = self._world.sum_floats(own)
            for step, total in zip(self._closed, totals, strict=True):
                step.global_count = torch.tensor(total)
        return super().collect()
