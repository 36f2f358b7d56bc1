"""Task: what the user brings. A model, its loss on a batch, and an optimizer for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.adapter import Adapter
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.optimization.own_schedule import ScheduleFactory
from drivetrain.train.outputs import PerSample
from drivetrain.train.several.optimizers import as_one


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
OptimizerFactory = Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""`optimizer(parameters, optimization)`, `(model, optimization)` or `(named_parameters, …)`."""


_FUNCTIONS = {
    "model": "pass one that makes the model: model=make_model",
    "loss": "pass one: lambda model, batch: criterion(model(batch[0]), batch[1])",
    "optimizer": "pass one that makes it: lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    "metrics": "pass one of model and batch, which returns names and values",
    "schedule": "pass one of optimizer and total_steps, which returns a scheduler",
}
"""What a task is made of, and what to pass instead of what is none."""


@dataclass(frozen=True)
class Task:
    """What is trained: a model and its loss, and optionally how.

    Attributes:
        model: Makes the model. Called once per rank, under the run's seed.
        loss: `loss(model, batch)`: a mean over the batch's samples, or a `Total`. With
            `(loss, {"ce": ce, "kl": kl})` its parts are recorded and shown beside it.
        optimizer: `optimizer(parameters, config.optimization)`; the config's when left out. With a
            first argument called `model` or `named_parameters` it gets those instead, for groups by
            name; the second may be left out. Several in a list are stepped as one.
        schedule: `schedule(optimizer, total_steps)`: a torch LR scheduler, stepped after each step
            (ReduceLROnPlateau: each evaluation), or an `LRSchedule` that says when. Saved with the
            run. The config's schedule when left out.
        metrics: `metrics(model, batch)`: what evaluation reports, by name, as means or Totals;
            the loss alone when left out. An "accuracy" among them becomes `History.best_accuracy`.
            What is a `PerSample` is not averaged, but kept for `summarize`.
        summarize: `summarize(outputs)` turns the `PerSample` values of all samples, by name and in
            the data's order, into numbers by name: for what is no mean, like AUROC or BLEU. Or a
            torchmetrics object, whose `update` takes them by their names (`preds`, `target`).
        adapter: Of a task that was made from another library's object: its hooks and its data.
        tokenizer: A tokenizer or processor of Hugging Face's, whose files go with the model's into
            `save_pretrained` and `drivetrain checkpoint export`.
    """

    model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: OptimizerFactory = from_config
    metrics: MetricsFunction | None = None
    summarize: Any = None
    schedule: ScheduleFactory | None = None
    adapter: Adapter | None = None
    tokenizer: Any = None

    @classmethod
    def from_lightning(
        cls, module: nn.Module | Callable[[], nn.Module], datamodule: Any = None
    ) -> Task:
        """A LightningModule, or a function that makes one, as a task.

        Its steps, `self.log`, optimizers, schedules and hooks are called as Lightning's Trainer
        calls them; what cannot be honoured is refused. `fit()` without data takes the loaders of
        `datamodule`, or of the module. How batches, epochs, devices and precision are, the config
        says.
        """
        from drivetrain.train.lightning.link import task_from

        return task_from(module, datamodule)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            rule = "is a model, where a function that makes one belongs"
            remedy = "pass the function (model=make_model), which runs under the run's seed"
            raise ConfigError([Problem("Task.model", rule, remedy, type(self.model).__name__)])
        for name, remedy in _FUNCTIONS.items():
            given = getattr(self, name)
            may_be_left_out = name in ("metrics", "schedule")
            if isinstance(given, nn.Module) or not (
                callable(given) or (given is None and may_be_left_out)
            ):
                rule = "is no function"
                raise ConfigError([Problem(f"Task.{name}", rule, remedy, type(given).__name__)])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Loss | PerSample | float]:
        """What evaluation reports on one batch."""
        if self.metrics is not None:
            return self.metrics(model, batch)
        loss, parts = split(self.loss(model, batch))
        return {"loss": loss, **parts}

    def make_optimizer(self, model: nn.Module, optimization: Optimization) -> torch.optim.Optimizer:
        """Call the user's function with what its arguments are called for.

        A class of torch's, bare or in a partial, has settings of its own as second argument.
        """
        made_of = self.optimizer.func if isinstance(self.optimizer, partial) else self.optimizer
        names = [
            parameter.name
            for parameter in inspect.signature(self.optimizer).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        first: Any = [parameter for _, parameter in named]
        if names[:1] == ["model"]:
            first = model
        elif names[:1] == ["named_parameters"]:
            first = named
        is_class = isinstance(made_of, type) and issubclass(made_of, torch.optim.Optimizer)
        wants_section = not is_class and len(names) != 1  # none are those of *arguments
        made = self.optimizer(first, optimization) if wants_section else self.optimizer(first)
        return as_one(made)


def split(found: Loss | LossAndParts) -> LossAndParts:
    """The loss, and its parts, if the user's function gives any."""
    return found if isinstance(found, tuple) else (found, {})
