"""History: what a run came to, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


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

    def summary(self) -> dict[str, int]:
        """What is written down when the run is over."""
        return {"steps": len(self.steps), "skipped_steps": self.skipped_steps}

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
