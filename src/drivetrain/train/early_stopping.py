"""EarlyStopping: end a run when its evaluations stop improving or miss a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.config import schema
from drivetrain.train.history import EvaluationResult, History, Mode
from drivetrain.train.hooks import Hook

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class EarlyStopping(Hook):
    """Stop after `patience` evaluations in a row that did not improve on the best one.

    It uses the run's recorded evaluations, so it has no state to save, and continues to count
    after a resume. In your own loop: `if reason := stopping.reason(loop.history):
    loop.stop(reason)`. The config's `early_stopping` section does the same without code.

    Args:
        monitor: Name of the metric.
        patience: Number of evaluations without improvement; None: only `limits` apply.
        min_delta: An evaluation counts as better only if it improves by more than this.
        mode: Whether lower ("min") or higher ("max") values are better.
        limits: Pairs of a step and a value. The run also stops when the first evaluation at or
            after that step is worse than the value.
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
        """Return the config's rule, or None if it sets none."""
        if said.patience is None and not said.limits:
            return None
        made = cls(said.metric, said.patience, said.min_delta, said.mode, said.limits)
        made._named_by = "early_stopping.metric"
        return made

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:  # noqa: ARG002
        """Stop if it is time. The result is the same on every rank, so all ranks ask."""
        if (reason := self.reason(trainer.history)) is not None:
            trainer.stop(reason)

    def reason(self, history: History) -> str | None:
        """Return why the run should stop now, or None."""
        results = history.with_metric(self.monitor, self._named_by)
        return self._worse_than_limit(results) or self._no_better(results)

    def _worse_than_limit(self, results: Sequence[EvaluationResult]) -> str | None:
        sign = 1.0 if self.mode == "min" else -1.0
        for step, limit in self.limits:
            value = next((r.metrics[self.monitor] for r in results if r.step >= step), None)
            if value is not None and not sign * value <= sign * limit:  # true for NaN as well
                return f"{self.monitor} was {value:.6g} at step {step}, worse than {limit:.6g}"
        return None

    def _no_better(self, results: Sequence[EvaluationResult]) -> str | None:
        sign = 1.0 if self.mode == "min" else -1.0
        best: float | None = None
        best_step = waited = 0
        for result in results:
            value = sign * result.metrics[self.monitor]
            if best is None or value < best - self.min_delta:  # never true for NaN
                best, best_step, waited = value, result.step, 0
            else:
                waited += 1
        if best is None or self.patience is None or waited < self.patience:
            return None
        return (
            f"{self.monitor} did not improve on {sign * best:.6g} (after step {best_step}) in "
            f"{waited} evaluations"
        )
