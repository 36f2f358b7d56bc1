"""History: the results of a run, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drivetrain.core.errors import ConfigError, Problem

Mode = Literal["min", "max"]
"""Whether the lowest or the highest value is best."""


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step, over all ranks."""

    step: int
    """Number of the step, counted from 1."""
    loss: float
    learning_rate: float
    grad_norm: float | None
    """Gradient norm before clipping; None at steps where it was not computed."""
    num_samples: int
    num_tokens: float | None
    """What the loss's Total counts; None if the loss is a plain mean."""
    is_skipped: bool = False
    """True if the fp16 scaler skipped the step because its gradients were not finite."""
    parts: Mapping[str, float] = {}
    """Parts that the task returns with the loss, by name, over all ranks."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one pass over the validation data."""

    step: int
    metrics: Mapping[str, float]
    """Value of each metric by name."""
    num_samples: int
    """Number of evaluated samples: all of them, each once."""


@dataclass
class History:
    """Steps and evaluations of a run, as returned by `Trainer.fit`. Times are in seconds."""

    total_time: float = 0.0
    steps: list[StepMetrics] = field(default_factory=list)
    """Up to the newest logged step: steps are added together, every `record.logging_steps`."""
    evaluations: list[EvaluationResult] = field(default_factory=list)
    run_dir: Path | None = None
    resumed_step: int = 0
    """The step this attempt resumed from; `steps` begins after it."""
    skipped_steps: int = 0
    """Steps that the fp16 scaler skipped in the whole run, including earlier attempts."""
    stopped: str = ""
    """Why the run ended before its last step; empty if it did not."""

    def summary(self) -> dict[str, Any]:
        """Return the values that are recorded at the end of the run."""
        why = {"stopped": self.stopped} if self.stopped else {}
        return {"steps": len(self.steps), "skipped_steps": self.skipped_steps, **why}

    def best(self, metric: str = "loss", mode: Mode = "min") -> EvaluationResult | None:
        """Return the evaluation with the best `metric`, the first of equals, or None."""
        sign = 1.0 if mode == "min" else -1.0
        finite = [r for r in self.with_metric(metric) if math.isfinite(r.metrics[metric])]
        return min(finite, key=lambda result: sign * result.metrics[metric], default=None)

    def with_metric(self, name: str, where: str = "metric") -> list[EvaluationResult]:
        """Return the evaluations with this metric.

        Raises:
            ConfigError: There are evaluations, but none has it; the message names `where`.
        """
        found = [result for result in self.evaluations if name in result.metrics]
        if self.evaluations and not found:
            names = sorted({each for result in self.evaluations for each in result.metrics})
            remedy = f"use one of {', '.join(names)}"
            raise ConfigError([Problem(where, "no evaluation has this metric", remedy, name)])
        return found

    @property
    def losses(self) -> list[float]:
        """Training loss of each step in `steps`."""
        return [metrics.loss for metrics in self.steps]

    @property
    def best_accuracy(self) -> float | None:
        """Highest "accuracy" of any evaluation, or None."""
        found = [
            result.metrics["accuracy"]
            for result in self.evaluations
            if "accuracy" in result.metrics
        ]
        return max(found, default=None)
