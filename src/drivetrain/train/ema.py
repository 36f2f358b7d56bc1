"""EMA: an exponential moving average of the weights, for evaluations and exports."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.several_models import SeveralModels
from drivetrain.train.assemble import Assembly
from drivetrain.train.averages import Averages
from drivetrain.train.engine import Engine
from drivetrain.train.hooks import Hook

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class EMA(Hook):
    """Exponential moving average of the trained weights; saved and restored with the run.

    The average is updated after each step. Buffers are not averaged: the model's own are used.
    `drivetrain checkpoint export --ema` writes the averages. Inside `ema.applied()` the model has
    the averaged weights, so `full_state_dict()` and `save_pretrained()` return or write them.

    Pass it to `Trainer` as a hook; in your own loop, use `prepare(…, ema=EMA(decay=0.999))`.

    Args:
        decay: Share of the average that is kept at each step: at least 0 and below 1.
        evaluate: Use the averages for evaluations and predictions.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            rule, remedy = "must be at least 0 and below 1", "use 0.9 to 0.9999"
            raise ConfigError([Problem("EMA.decay", rule, remedy, decay)])
        self.decay = decay
        self.evaluate = evaluate
        self._engine: Engine | None = None

    def on_setup(self, trainer: Trainer) -> None:
        """Attach to the engine, before a checkpoint is loaded."""
        if trainer.assembly is not None:
            self.attach(trainer.assembly)

    def attach(self, assembly: Assembly) -> None:
        """Let the engine keep the averages; ConfigError if this run cannot have them."""
        engine, strategy = assembly.engine, assembly.config.parallel.strategy
        rule = ""
        if engine.averages is not None:
            rule = "this model already has an EMA"
        elif isinstance(engine.spread, SeveralModels):
            rule = "it averages one model, and this run trains several"
        elif engine.spread.engine_step is not None:
            rule = f"{strategy} manages the weights itself"
        elif engine.spread.local_steps is not None:
            rule = f"with {strategy} ranks have different weights between synchronizations"
        elif assembly.config.fault_tolerance == "live":
            rule = "a replica that rejoins would have no averages"
        if rule:
            remedy = "leave it out"
            raise ConfigError([Problem("EMA", rule, remedy, has_value=False)])
        engine.averages = Averages(engine.spread, self.decay, evaluate=self.evaluate)
        self._engine = engine

    def applied(self) -> AbstractContextManager[None]:
        """Context in which the model has the averages. Enter on every rank, between steps."""
        if self._engine is None or self._engine.averages is None:
            raise RuntimeError("applied() needs the model: call it during or after training")
        return self._engine.averaged(self._engine.averages)
