"""LoggedSteps: check that the steps that were just logged still train.

A NaN or infinite loss ends the run. fp16 is the exception: its scaler skips a step whose gradients
are not finite and tries a smaller scale, which is normal a few times at the beginning and
occasionally later. Many skips in a row are not: no smaller scale helps if the loss is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.core.errors import ConfigError, NonFiniteLoss, Problem
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import History, StepMetrics
from drivetrain.train.watch.remedies import change_settings, for_any_cause

_REMEDY = (
    "use precision.dtype=bf16, find the cause with fp32 (which stops at the first operation with a "
    "result that is not finite), or lower precision.scaler.init_scale"
)

_MOST_UNCOUNTED = 20
_UNCOUNTED_REMEDY = (
    "check the labels, the mask and the weights: is every label the ignore index (-100 for "
    "cross_entropy), or every weight 0?"
)


@dataclass
class LoggedSteps:
    """Checks logged steps; `most_skipped` in a row end the run (None without a scaler)."""

    history: History
    say: Callable[[str], None]
    most_skipped: int | None
    remedy: str
    """For a loss that is not finite."""
    _in_a_row: int = 0
    _uncounted: int = 0
    """Steps in a row that counted no tokens."""

    @classmethod
    def of(cls, assembly: Assembly, history: History, say: Callable[[str], None]) -> LoggedSteps:
        """Return the checks for a run."""
        precision = assembly.config.precision
        most_skipped = precision.scaler.max_skipped_steps if precision.dtype == "fp16" else None
        return cls(history, say, most_skipped, for_any_cause(change_settings(assembly)))

    def note(self, metrics: Sequence[StepMetrics]) -> None:
        """Check the steps since the last call."""
        num_skipped = sum(step.is_skipped for step in metrics)
        if num_skipped:
            self.say(
                f"step {metrics[-1].step}: {num_skipped} of the last {len(metrics)} steps were "
                "skipped because their fp16 gradients were not finite"
            )
        for step in metrics:
            self._check(step)
            self._check_count(step)

    def _check(self, step: StepMetrics) -> None:
        if not step.is_skipped:
            self._in_a_row = 0
            if not math.isfinite(step.loss):
                raise NonFiniteLoss(
                    f"train/loss = {step.loss} at step {step.step}: the loss is not finite; "
                    f"{self.remedy}"
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
        """Check for steps that count nothing: they do not train, and have a loss of 0."""
        if step.num_tokens != 0:
            self._uncounted = 0
            return
        self._uncounted += 1
        if self._uncounted == 1:
            self.say(
                f"warning: step {step.step} counted no tokens (every Total's count is 0), so it "
                f"trained nothing; {_MOST_UNCOUNTED} such steps in a row end the run"
            )
        if self._uncounted >= _MOST_UNCOUNTED:
            raise self._nothing_counted(f"the last {self._uncounted} steps, up to {step.step},")

    def _nothing_counted(self, which: str) -> ConfigError:
        rule = f"{which} counted no tokens, and trained nothing"
        return ConfigError([Problem("loss", rule, _UNCOUNTED_REMEDY, "Total(…, 0)")])

    def end(self, num_steps: int) -> None:
        """Report, after the last step, how many were skipped; an error if all were."""
        if num_steps and self._uncounted == num_steps:
            raise self._nothing_counted(f"all {num_steps} steps of the run")
        num_skipped = self.history.skipped_steps
        if not num_skipped:
            return
        if num_skipped == num_steps:
            raise NonFiniteLoss(
                f"precision.dtype = fp16: none of the run's {num_steps} steps changed the weights, "
                f"because their gradients were never finite; {_REMEDY}"
            )
        self.say(
            f"{num_skipped} of {num_steps} steps were skipped because their fp16 gradients were "
            "not finite"
        )
