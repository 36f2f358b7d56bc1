"""EMA: a moving average of the weights, for evaluations and for exports."""

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
    """Averages the trained weights after each step; saved and restored with the run.

    With `evaluate`, evaluations and predictions are made with the averages. Buffers are the
    model's own. `drivetrain checkpoint export --ema` writes them, and inside `ema.applied()` the
    model has them: `full_state_dict()` and `save_pretrained()` then give the averages.

    In a loop of one's own: `prepare(…, ema=EMA(decay=0.999))`.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            rule, remedy = "is no share of the average that is kept", "use 0.9 to 0.9999"
            raise ConfigError([Problem("EMA.decay", rule, remedy, decay)])
        self.decay = decay
        self.evaluate = evaluate
        self._engine: Engine | None = None

    def on_setup(self, trainer: Trainer) -> None:
        """The model is there, and what a checkpoint holds is not loaded yet."""
        if trainer.assembly is not None:
            self.attach(trainer.assembly)

    def attach(self, assembly: Assembly) -> None:
        """Let the engine keep the averages."""
        engine, strategy = assembly.engine, assembly.config.parallel.strategy
        rule = ""
        if engine.averages is not None:
            rule = "there is another EMA of this model"
        elif isinstance(engine.spread, SeveralModels):
            rule = "there are several models, each stepped on its own"
        elif engine.spread.engine_step is not None:
            rule = f"{strategy} keeps the weights to itself"
        elif engine.spread.local_steps is not None:
            rule = f"with {strategy} ranks have weights of their own between two agreements"
        elif assembly.config.fault_tolerance == "live":
            rule = "a replica that comes back would have no averages"
        if rule:
            remedy = "leave it out"
            raise ConfigError([Problem("EMA", rule, remedy, has_value=False)])
        engine.averages = Averages(engine.spread, self.decay, evaluate=self.evaluate)
        self._engine = engine

    def applied(self) -> AbstractContextManager[None]:
        """Within, the model has the averages. On every rank, between steps."""
        if self._engine is None or self._engine.averages is None:
            raise RuntimeError("applied() needs the model: call it while or after it is trained")
        return self._engine.averaged(self._engine.averages)
