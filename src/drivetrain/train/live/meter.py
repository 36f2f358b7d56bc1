"""LiveMeter: each step's loss over all replicas, settled within the step itself.

A replica that dies takes nothing with it that is still to be summed, and one that joins is told
what came before. The numbers travel beside the gradients, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import MicroBatch
from drivetrain.parallel.world import World
from drivetrain.train.history import StepMetrics
from drivetrain.train.task import Loss
from drivetrain.train.watch.meter import Meter


@dataclass(frozen=True)
class Past:
    """One object to whoever sends it, however many steps there are."""

    steps: list[StepMetrics]


class LiveMeter(Meter):
    """`own` is summed over the replicas by the loop and comes back through `settle`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.finished: list[StepMetrics] = []
        """Every step of the run so far, this replica's or not."""
        self._num_reported = 0
        self._own_samples = 0
        self._totals = (0.0, 0.0, 0.0, 0.0)

    def add(self, loss: Loss, micro: MicroBatch) -> None:
        """One micro-batch's loss."""
        super().add(loss, micro)
        self._own_samples += micro.num_samples

    def add_parts(self, parts: Mapping[str, Loss | float], micro: MicroBatch) -> None:  # noqa: ARG002
        """A step's sums are settled within it, and these are not among them."""
        rule = "comes with parts, which are not added up over live replicas"
        problem = Problem(
            "loss", rule, "return the loss alone, or start without --live", set(parts)
        )
        raise ConfigError([problem])

    def own(self) -> torch.Tensor:
        """This replica's part of the step: loss, count, samples, and whether it counts itself."""
        here, device = self._open, self._world.device
        numbers = torch.zeros(4, dtype=torch.float64, device=device)
        for loss, weight in zip(here.losses, here.weights, strict=True):
            numbers[0] += loss.double() * weight
        for count in here.counts:
            numbers[1] += count
        numbers[2] = self._own_samples
        numbers[3] = float(bool(here.counts))
        return numbers

    def settle(self, totals: list[float]) -> None:
        """The same over all replicas. A sample missed or taken twice stops the run here."""
        loss, count, samples, counting = totals
        if round(samples) != self._open.batch_samples:
            raise RuntimeError(
                f"{samples:g} samples were trained in a step of {self._open.batch_samples}: "
                "the replicas do not share one config"
            )
        self._totals = (loss, count, samples, counting)
        self._counts_tokens = counting > 0

    def forget(self) -> None:
        """The step under way is done again."""
        self._open = type(self._open)()
        self._own_samples = 0

    def count_correction(self) -> torch.Tensor | None:
        """Samples / count over all replicas; None when the count is the samples."""
        _, count, samples, _ = self._totals
        if not self._counts_tokens:
            return None
        return torch.tensor(samples / (count or 1.0), device=self._world.device).float()

    def end_step(self, number: int, learning_rate: float) -> None:
        """Close the step under way; `number` counts from 1."""
        loss, count, samples, _ = self._totals
        norm, found_inf = self.grad_norm, self._open.found_inf
        self.finished.append(
            StepMetrics(
                step=number,
                loss=loss / ((count or 1.0) if self._counts_tokens else samples),
                learning_rate=learning_rate,
                grad_norm=None if norm is None else float(norm),
                num_samples=self._open.batch_samples,
                num_tokens=count if self._counts_tokens else None,
                is_skipped=found_inf is not None and bool(found_inf > 0),
            )
        )
        self.forget()

    def past(self) -> Past:
        """For a replica that was not there."""
        return Past(list(self.finished))

    def adopt(self, past: Past) -> None:
        """Another replica's past; what of it is news here is reported with the next steps."""
        self.finished = past.steps

    def collect(self) -> list[StepMetrics]:
        """Every finished step since the last call. Nothing is sent."""
        news, self._num_reported = self.finished[self._num_reported :], len(self.finished)
        return news
