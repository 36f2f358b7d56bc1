"""EarlyStopping: end a run whose evaluations no longer get better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.train.history import EvaluationResult, History, Mode
from drivetrain.train.hooks import Hook

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer


class EarlyStopping(Hook):
    """Stops after `patience` evaluations in a row that were not better than the best before them.

    Better is: by more than `min_delta`, downwards or (`mode="max"`) upwards. It goes by the run's
    evaluations, so it has nothing to save, and a resume counts on.

    In a loop of one's own: `if reason := stopping.reason(loop.history): loop.stop(reason)`.
    """

    def __init__(
        self, monitor: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: Mode = "min"
    ) -> None:
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:  # noqa: ARG002
        """The same result on every rank, so all ask for it."""
        if (reason := self.reason(trainer.history)) is not None:
            trainer.stop(reason)

    def reason(self, history: History) -> str | None:
        """Why to stop now; None while it is not time."""
        sign = 1.0 if self.mode == "min" else -1.0
        best: float | None = None
        best_step = waited = 0
        for result in history.with_metric(self.monitor, "EarlyStopping.monitor"):
            value = sign * result.metrics[self.monitor]
            if best is None or value < best - self.min_delta:  # never so for one that is no number
                best, best_step, waited = value, result.step, 0
            else:
                waited += 1
        if best is None or waited < self.patience:
            return None
        return (
            f"{self.monitor} was not better than {sign * best:.6g} (after step {best_step}) in "
            f"{waited} evaluations"
        )
