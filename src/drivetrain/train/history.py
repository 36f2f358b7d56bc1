"""History: what a run came to, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drivetrain.core.errors import ConfigError, Problem

Mode = Literal["min", "max"]
"""Whether the lowest or the highest is best."""


class StepMetrics(NamedTuple):
    """One optimizer step, over all ranks."""

    step: int
    """Counted from 1: after this many steps."""
    loss: float
    learning_rate: float
    grad_norm: float | None
    """Before clipping; None at steps where nobody needed it."""
    num_samples: int
    num_tokens: float | None
    """The count of the loss, where the task gives one."""
    is_skipped: bool = False
    """Whether fp16's scaler has left the weights as they were: the gradients were not finite."""
    parts: Mapping[str, float] = {}
    """What the task returns beside the loss, by name, over all ranks."""


@dataclass(frozen=True)
class EvaluationResult:
    """One pass over the validation data."""

    step: int
    metrics: Mapping[str, float]
    num_samples: int
    """How many samples were evaluated: all of them, each once."""


@dataclass
class History:
    """Everything fit() has to say. Times in seconds."""

    total_time: float = 0.0
    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    run_dir: Path | None = None
    resumed_step: int = 0
    """Where this attempt went on from; `steps` begins after it."""
    skipped_steps: int = 0
    """Of the whole run, earlier attempts included: those that fp16's scaler has skipped."""
    stopped: str = ""
    """Why the run has ended before its last step; empty when it has not."""

    def summary(self) -> dict[str, Any]:
        """What is written down when the run is over."""
        why = {"stopped": self.stopped} if self.stopped else {}
        return {"steps": len(self.steps), "skipped_steps": self.skipped_steps, **why}

    def best(self, metric: str = "loss", mode: Mode = "min") -> EvaluationResult | None:
        """The evaluation with the best `metric`, the first of equals; None before there is one."""
        sign = 1.0 if mode == "min" else -1.0
        finite = [r for r in self.with_metric(metric) if math.isfinite(r.metrics[metric])]
        return min(finite, key=lambda result: sign * result.metrics[metric], default=None)

    def with_metric(self, name: str, where: str = "metric") -> list[EvaluationResult]:
        """The evaluations that have it; ConfigError, naming `where`, when others are all."""
        found = [result for result in self.evaluations if name in result.metrics]
        if self.evaluations and not found:
            names = sorted({each for result in self.evaluations for each in result.metrics})
            remedy = f"use one of {', '.join(names)}"
            raise ConfigError([Problem(where, "no evaluation has this metric", remedy, name)])
        return found

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [metrics.loss for metrics in self.steps]

    @property
    def best_accuracy(self) -> float | None:
        """The highest "accuracy" of any evaluation; None when there was none."""
        found = [
            result.metrics["accuracy"]
            for result in self.evaluations
            if "accuracy" in result.metrics
        ]
        return max(found, default=None)
