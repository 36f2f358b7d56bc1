"""LoggedSteps: whether the steps that have just been logged are still training.

A loss that is no number ends the run. fp16 is the exception: its scaler skips a step whose
gradients are not finite and tries a smaller scale, which is normal a few times at the beginning and
now and then later. Many skips in a row are not: no smaller scale helps a loss that is nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, NonFiniteLoss, Problem
from drivetrain.train.history import History, StepMetrics

_REMEDY = (
    "use precision.dtype=bf16, look for the cause with fp32 (which stops at the first operation "
    "that is not finite), or lower precision.scaler.init_scale"
)

_MOST_UNCOUNTED = 20
_UNCOUNTED_REMEDY = (
    "look at the labels, the mask and the weights: is every label the ignore index (-100 for "
    "cross_entropy), or every weight 0?"
)


@dataclass
class LoggedSteps:
    """`most_skipped` in a row end the run; None without a scaler."""

    history: History
    say: Callable[[str], None]
    most_skipped: int | None
    _in_a_row: int = 0
    _uncounted: int = 0
    """Steps in a row in which not one token counted."""

    @classmethod
    def of(cls, config: RunConfig, history: History, say: Callable[[str], None]) -> LoggedSteps:
        """As the config says."""
        has_scaler = config.precision.dtype == "fp16"
        return cls(history, say, config.precision.scaler.max_skipped_steps if has_scaler else None)

    def note(self, metrics: Sequence[StepMetrics]) -> None:
        """The steps since the last call."""
        num_skipped = sum(step.is_skipped for step in metrics)
        if num_skipped:
            self.say(
                f"step {metrics[-1].step}: {num_skipped} of the last {len(metrics)} steps were "
                "skipped, their fp16 gradients were not finite"
            )
        for step in metrics:
            self._check(step)
            self._check_count(step)

    def _check(self, step: StepMetrics) -> None:
        if not step.is_skipped:
            self._in_a_row = 0
            if not math.isfinite(step.loss):
                raise NonFiniteLoss(
                    f"train/loss = {step.loss} at step {step.step}: no longer a number; lower "
                    "optimization.learning_rate, set optimization.max_grad_norm, or look at the "
                    "data"
                )
            return
        self._in_a_row += 1
        if self.most_skipped is not None and self._in_a_row >= self.most_skipped:
            raise NonFiniteLoss(
                f"precision.scaler.max_skipped_steps = {self.most_skipped}: the last "
                f"{self._in_a_row} steps were skipped because their fp16 gradients were not finite "
                f"(up to step {step.step}, with loss {step.loss}); {_REMEDY}"
            )

    def _check_count(self, step: StepMetrics) -> None:
        """Steps in which nothing is counted leave the weights as they are, with a loss of 0."""
        if step.num_tokens != 0:
            self._uncounted = 0
            return
        self._uncounted += 1
        if self._uncounted == 1:
            self.say(
                f"warning: step {step.step} has not one counted token (every Total's count is 0), "
                f"so it trains nothing; {_MOST_UNCOUNTED} such steps in a row end the run"
            )
        if self._uncounted >= _MOST_UNCOUNTED:
            raise self._nothing_counted(f"the last {self._uncounted} steps, up to {step.step},")

    def _nothing_counted(self, which: str) -> ConfigError:
        rule = f"{which} had not one counted token, and trained nothing"
        return ConfigError([Problem("loss", rule, _UNCOUNTED_REMEDY, "Total(…, 0)")])

    def end(self, num_steps: int) -> None:
        """After the run's last step: how many were skipped in all; all of them are no training."""
        if num_steps and self._uncounted == num_steps:
            raise self._nothing_counted(f"all {num_steps} steps of the run")
        num_skipped = self.history.skipped_steps
        if not num_skipped:
            return
        if num_skipped == num_steps:
            raise NonFiniteLoss(
                f"precision.dtype = fp16: none of the run's {num_steps} steps has moved the "
                f"weights, their gradients were never finite; {_REMEDY}"
            )
        self.say(
            f"{num_skipped} of {num_steps} steps were skipped, their fp16 gradients were not finite"
        )
