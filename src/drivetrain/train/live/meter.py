"""LiveMeter: each step's loss over all replicas, reduced within the step itself.

So a replica that fails has no sums that are still to be reduced, and one that joins gets the past
steps. The numbers are reduced together with the gradients, in the same transaction.
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
    """Past steps in one object, so that they are sent as one, however many there are."""

    steps: list[StepMetrics]


class LiveMeter(Meter):
    """A Meter whose numbers (`own`) the loop sums over the replicas and returns to `settle`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.finished: list[StepMetrics] = []
        """Every step of the run so far, including those before this replica joined."""
        self._num_reported = 0
        self._own_samples = 0
        self._totals = (0.0, 0.0, 0.0, 0.0)

    def add(self, loss: Loss, micro: MicroBatch) -> None:
        """Add a micro-batch's loss."""
        super().add(loss, micro)
        self._own_samples += micro.num_samples

    def add_parts(self, parts: Mapping[str, Loss | float], micro: MicroBatch) -> None:  # noqa: ARG002
        """ConfigError: parts are not among the sums that are reduced within a step."""
        rule = "comes with parts, which are not summed over live replicas"
        problem = Problem(
            "loss", rule, "return the loss alone, or start without --live", set(parts)
        )
        raise ConfigError([problem])

    def own(self) -> torch.Tensor:
        """Return this replica's loss, count, samples, and whether it counts with Totals."""
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
        """Take the sums over all replicas; RuntimeError if a sample was missed or used twice."""
        loss, count, samples, counting = totals
        if round(samples) != self._open.batch_samples:
            raise RuntimeError(
                f"{samples:g} samples were trained in a step of {self._open.batch_samples}: "
                "the replicas have different configs"
            )
        self._totals = (loss, count, samples, counting)
        self._counts_tokens = counting > 0

    def forget(self) -> None:
        """Discard the current step, which is repeated."""
        self._open = type(self._open)()
        self._own_samples = 0

    def count_correction(self) -> torch.Tensor | None:
        """Return samples / count over all replicas; None if samples are counted."""
        _, count, samples, _ = self._totals
        if not self._counts_tokens:
            return None
        return torch.tensor(samples / (count or 1.0), device=self._world.device).float()

    def end_step(self, number: int, learning_rate: float) -> None:
        """Close the current step; `number` counts from 1."""
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
        """Return the past steps, for a replica that missed them."""
        return Past(list(self.finished))

    def adopt(self, past: Past) -> None:
        """Take another replica's past; steps that are new here are reported with the next ones."""
        self.finished = past.steps

    def collect(self) -> list[StepMetrics]:
        """Return every finished step since the last call. Sends nothing."""
        news, self._num_reported = self.finished[self._num_reported :], len(self.finished)
        return news
