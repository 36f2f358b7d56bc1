"""EarlyStopping: end a run whose evaluations are not, or no longer, good enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.config import schema
from drivetrain.train.history import EvaluationResult, History, Mode
from drivetrain.train.hooks import Hook

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class EarlyStopping(Hook):
    """Stops after `patience` evaluations in a row that were not better than the best before them.

    Better is: by more than `min_delta`, downwards or (`mode="max"`) upwards. It goes by the run's
    evaluations, so it has nothing to save, and a resume counts on. `limits` are pairs of a step and
    a value: it also stops when the first evaluation at or after that step is worse.

    In a loop of one's own: `if reason := stopping.reason(loop.history): loop.stop(reason)`. The
    config's `early_stopping` needs neither.
    """

    def __init__(
        self,
        monitor: str = "loss",
        patience: int | None = 3,
        min_delta: float = 0.0,
        mode: Mode = "min",
        limits: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.limits = limits
        self._named_by = "EarlyStopping.monitor"

    @classmethod
    def of(cls, said: schema.EarlyStopping) -> EarlyStopping | None:
        """As the config has it; None when it asks for nothing."""
        if said.patience is None and not said.limits:
            return None
        made = cls(said.metric, said.patience, said.min_delta, said.mode, said.limits)
        made._named_by = "early_stopping.metric"
        return made

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:  # noqa: ARG002
        """The same result on every rank, so all ask for it."""
        if (reason := self.reason(trainer.history)) is not None:
            trainer.stop(reason)

    def reason(self, history: History) -> str | None:
        """Why to stop now; None while it is not time."""
        results = history.with_metric(self.monitor, self._named_by)
        return self._worse_than_limit(results) or self._no_better(results)

    def _worse_than_limit(self, results: Sequence[EvaluationResult]) -> str | None:
        sign = 1.0 if self.mode == "min" else -1.0
        for step, limit in self.limits:
            value = next((r.metrics[self.monitor] for r in results if r.step >= step), None)
            if value is not None and not sign * value <= sign * limit:  # so for nan, too
                return f"{self.monitor} was {value:.6g} at step {step}, worse than {limit:.6g}"
        return None

    def _no_better(self, results: Sequence[EvaluationResult]) -> str | None:
        sign = 1.0 if self.mode == "min" else -1.0
        best: float | None = None
        best_step = waited = 0
        for result in results:
            value = sign * result.metrics[self.monitor]
            if best is None or value < best - self.min_delta:  # never so for one that is no number
                best, best_step, waited = value, result.step, 0
            else:
                waited += 1
        if best is None or self.patience is None or waited < self.patience:
            return None
        return (
            f"{self.monitor} was not better than {sign * best:.6g} (after step {best_step}) in "
            f"{waited} evaluations"
        )
