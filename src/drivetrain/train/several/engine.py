"""The engine of several models: one `Engine` for each, combined for the run.

A step of the run is one iteration of the script's loop, on one global batch. In it, each model may
use the batch, and its optimizer step, as often as the script likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.data.batches import MicroBatch
from drivetrain.parallel.several_models import SeveralModels
from drivetrain.parallel.world import World
from drivetrain.train.engine import Engine
from drivetrain.train.history import StepMetrics
from drivetrain.train.optimization.schedule import LearningRate, Occasion
from drivetrain.train.several.optimizers import OptimizersByName
from drivetrain.train.task import Loss, LossAndParts
from drivetrain.train.watch.meter import Meter


class SeveralEngines(Engine):
    """One engine for each model, with its own gradients, clipping, scaler, schedule and losses."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        spread: SeveralModels,
        optimizer: OptimizersByName,
        rates: SeveralRates,
    ) -> None:
        super().__init__(config, world, spread, optimizer, rates)
        self.by_name = {
            name: Engine(config, world, part, optimizer.by_name[name], rates.by_name[name], self)
            for name, part in spread.parts.items()
        }
        self.meter: Meter = _MeterOfAll(
            world, {name: engine.meter for name, engine in self.by_name.items()}
        )
        self._rates = rates

    def scalers(self) -> dict[str, Stateful]:
        """One scaler per model: an overflow in one does not change the scale of another."""
        return {
            f"scaler.{name}": engine.scaler
            for name, engine in self.by_name.items()
            if engine.scaler is not None
        }

    def backward_of(self, name: str, loss: Loss | LossAndParts, micro: MicroBatch) -> None:
        """Add a micro-batch's gradients to those of one model."""
        engine = self.by_name[name]
        engine.meter.note_batch(micro)  # a second pass over a batch is a separate step
        engine.backward(loss, micro)

    def step_of(self, name: str, step: int) -> None:
        """Complete one model's gradients and update its weights; `step` is the run's, from 0."""
        engine = self.by_name[name]
        engine.complete_gradients(step)
        groups = engine.optimizer.param_groups
        if not any(p.grad is not None for group in groups for p in group["params"]):
            rule = f"does not depend on any trainable weight of {name}"
            remedy = f"give backward() the name of the model it trains instead of {name}"
            raise ConfigError([Problem("loss", rule, remedy, has_value=False)])
        engine.before_change = self.before_change
        engine.step(step)
        self._rates.count(name)

    def compare_copies(self, step: int) -> None:
        """Compare the copies of each model."""
        for engine in self.by_name.values():
            engine.compare_copies(step)

    def agree_on_rate(self) -> None:
        """Check the learning rate of each model."""
        for engine in self.by_name.values():
            engine.agree_on_rate()


class SeveralRates(LearningRate):
    """A rate per model: a curve follows the run's steps, a scheduler its optimizer's steps."""

    def __init__(self, optimizer: OptimizersByName, by_name: Mapping[str, LearningRate]) -> None:
        super().__init__(optimizer)
        self.by_name = by_name
        self._num_steps = dict.fromkeys(by_name, 0)

    @property
    def members(self) -> Sequence[LearningRate]:
        """The rates of the models."""
        return tuple(self.by_name.values())

    def count(self, name: str) -> None:
        """Count a step of one model's optimizer."""
        self._num_steps[name] += 1

    def after(self, occasion: Occasion, metrics: Mapping[str, float] | None = None) -> None:
        """Called after an epoch or an evaluation; each engine reports its own steps."""
        for rate in self.members:
            rate.after(occasion, metrics)

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's last step."""
        for rate in self.members:
            rate.ends_at(total_steps)

    def begin_anew(
        self, num_done: Mapping[Occasion, int], found: list[Mapping[str, float]]
    ) -> None:
        """Restart each schedule after as many steps as its optimizer has made."""
        for name, rate in self.by_name.items():
            rate.begin_anew({**num_done, "step": self._num_steps[name]}, found)

    @property
    def terms(self) -> dict[str, Any]:
        """Each model's terms, under its name."""
        return {
            key.replace("scheduler.", f"scheduler.{name}.", 1): value
            for name, rate in self.by_name.items()
            for key, value in rate.terms.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the rates' states and the number of steps of each optimizer."""
        rates = {name: rate.state_dict() for name, rate in self.by_name.items()}
        return {"num_steps": dict(self._num_steps), "rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._num_steps.update(state["num_steps"])
        for name, rate in self.by_name.items():
            rate.load_state_dict(state["rates"][name])


class _MeterOfAll(Meter):
    """Combines the steps of all models to the run's steps."""

    def __init__(self, world: World, by_name: Mapping[str, Meter]) -> None:
        super().__init__(world)
        self._by_name = by_name

    def collect(self) -> list[StepMetrics]:
        """Return the steps since the last call; a loss is the sum of the models' mean losses."""
        steps: dict[int, dict[str, list[StepMetrics]]] = {}
        for name, meter in self._by_name.items():
            for metrics in meter.collect():
                steps.setdefault(metrics.step, {}).setdefault(name, []).append(metrics)
        return [_of_run(number, steps[number]) for number in sorted(steps)]


def _of_run(number: int, by_name: Mapping[str, list[StepMetrics]]) -> StepMetrics:
    """Combine the models' metrics: parts under their names, other values from the first model."""
    parts: dict[str, float] = {}
    for name, passes in by_name.items():
        parts[name] = _mean(each.loss for each in passes)
        for part in passes[0].parts:
            parts[f"{name}/{part}"] = _mean(each.parts[part] for each in passes)
    last = [passes[-1] for passes in by_name.values()]
    norms = [each.grad_norm for each in last if each.grad_norm is not None]
    return last[0]._replace(
        step=number,
        loss=sum(parts[name] for name in by_name),
        grad_norm=math.hypot(*norms) if len(norms) == len(last) else None,
        is_skipped=any(each.is_skipped for passes in by_name.values() for each in passes),
        parts=parts,
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def optimizers_of(optimizer: torch.optim.Optimizer) -> OptimizersByName:
    """Return the optimizers of several models."""
    if not isinstance(optimizer, OptimizersByName):
        raise TypeError("several models need several optimizers")
    return optimizer
