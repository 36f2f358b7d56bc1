"""Task: what the user brings. A model, its loss on a batch, and an optimizer for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.config.schema import Optimization
from drivetrain.train.outputs import PerSample


@dataclass(frozen=True)
class Total:
    """A sum with its count: `Total(loss_of_all_tokens, num_tokens)`.

    A mean per micro-batch would weigh a token in a short micro-batch more than one in a long one.
    With a Total the loss is the sum over the whole global batch, divided by the count over it.
    """

    sum: torch.Tensor
    count: torch.Tensor | int


Loss = torch.Tensor | Total
"""A plain tensor is the mean over the samples of the batch."""

LossAndParts = tuple[Loss, Mapping[str, Loss | float]]
"""A loss, and what it is made of, by name: means and Totals that are recorded beside it."""

LossFunction = Callable[[nn.Module, Any], Loss | LossAndParts]
MetricsFunction = Callable[[nn.Module, Any], Mapping[str, Loss | PerSample | float]]
OptimizerFactory = Callable[[Iterable[nn.Parameter], Optimization], torch.optim.Optimizer]


_IMPLEMENTATIONS: dict[str, tuple[bool | None, bool | None]] = {
    "auto": (None, None),
    "for_loop": (False, False),
    "foreach": (True, False),
    "fused": (False, True),
}
"""torch's `foreach` and `fused`"""


def adamw(parameters: Iterable[nn.Parameter], optimization: Optimization) -> torch.optim.Optimizer:
    """The default optimizer: AdamW with the config's learning rate and weight decay."""
    foreach, fused = _IMPLEMENTATIONS[optimization.adamw_implementation]
    return torch.optim.AdamW(
        parameters,
        lr=optimization.learning_rate,
        weight_decay=optimization.weight_decay,
        foreach=foreach,
        fused=fused,
    )


@dataclass(frozen=True)
class Task:
    """Three functions, and optionally others for what evaluation should report.

    Attributes:
        model: Makes the model. Called once per rank, under the run's seed.
        loss: `loss(model, batch)`: a mean over the batch's samples, or a `Total`. With
            `(loss, {"ce": ce, "kl": kl})` its parts are recorded and shown beside it.
        optimizer: `optimizer(parameters, config.optimization)`; AdamW when left out.
        metrics: `metrics(model, batch)`: what evaluation reports, by name, as means or Totals;
            the loss alone when left out. An "accuracy" among them becomes `History.best_accuracy`.
            What is a `PerSample` is not averaged, but kept for `summarize`.
        summarize: `summarize(outputs)` turns the `PerSample` values of all samples, by name and in
            the data's order, into numbers by name: for what is no mean, like AUROC or BLEU. Or a
            torchmetrics object, whose `update` takes them by their names (`preds`, `target`).
    """

    model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: OptimizerFactory = adamw
    metrics: MetricsFunction | None = None
    summarize: Any = None

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Loss | PerSample | float]:
        """What evaluation reports on one batch."""
        if self.metrics is not None:
            return self.metrics(model, batch)
        loss, parts = split(self.loss(model, batch))
        return {"loss": loss, **parts}


def split(found: Loss | LossAndParts) -> LossAndParts:
    """The loss, and its parts, if the user's function gives any."""
    return found if isinstance(found, tuple) else (found, {})
