"""Task: what the user provides: a model, its loss on a batch, and an optimizer."""

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
    """A sum and its count, e.g. `Total(loss_of_all_tokens, num_tokens)`.

    Averaging per micro-batch would give a token in a short micro-batch more weight than one in a
    long one. With a Total, the loss is the sum over the whole global batch divided by the count
    over the whole global batch.
    """

    sum: torch.Tensor
    count: torch.Tensor | int


Loss = torch.Tensor | Total
"""A plain tensor is a mean over the samples of the batch."""

LossAndParts = tuple[Loss, Mapping[str, Loss | float]]
"""A loss and its parts by name: means or Totals that are recorded with it."""

LossFunction = Callable[[nn.Module, Any], Loss | LossAndParts]
MetricsFunction = Callable[[nn.Module, Any], Mapping[str, Loss | PerSample | float]]
OptimizerFactory = Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""`optimizer(parameters, optimization)`, `(model, optimization)` or `(named_parameters, …)`."""


_FUNCTIONS = {
    "model": "pass one that builds the model: model=make_model",
    "loss": "pass one: lambda model, batch: criterion(model(batch[0]), batch[1])",
    "optimizer": "pass one that builds it: lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    "metrics": "pass one of model and batch, which returns names and values",
    "schedule": "pass one of optimizer and total_steps, which returns a scheduler",
}
"""The functions of a task, and the remedy when something else was passed."""


@dataclass(frozen=True)
class Task:
    """What to train: a model and its loss, and optionally how to optimize and evaluate it.

    Attributes:
        model: Function that builds the model. Called once per rank, under the run's seed.
        loss: `loss(model, batch)` returns a mean over the batch's samples, or a `Total`. If it
            returns `(loss, {"ce": ce, "kl": kl})`, these parts are recorded and shown with it.
        optimizer: `optimizer(parameters, config.optimization)` returns an optimizer, or a list of
            them that are stepped together. If its first argument is called `model` or
            `named_parameters`, it gets those instead, to build parameter groups by name; the second
            argument may be left out. Default: the config's optimizer.
        schedule: `schedule(optimizer, total_steps)` returns a torch LR scheduler, stepped after
            each step (ReduceLROnPlateau: after each evaluation), or an `LRSchedule` that sets when
            it is stepped. Saved with the run. Default: the config's schedule.
        metrics: `metrics(model, batch)` returns what an evaluation reports, by name, as means or
            Totals. A metric called "accuracy" becomes `History.best_accuracy`. `PerSample` values
            are not averaged but passed to `summarize`. Default: the loss.
        summarize: `summarize(outputs)` turns the `PerSample` values of all samples, by name and in
            the data's order, into numbers by name, for metrics that are not means, such as AUROC or
            BLEU. Or a torchmetrics object whose `update` takes these values by name (`preds`,
            `target`).
        adapter: Hooks and data of a task that was built from another library's object.
        tokenizer: A Hugging Face tokenizer or processor; `save_pretrained` and
            `drivetrain checkpoint export` write its files next to the model's.
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
        """Build a task from a LightningModule, or from a function that makes one.

        Its steps, `self.log`, optimizers, schedules and hooks are called as Lightning's Trainer
        calls them; a module that uses unsupported features is refused. `fit()` without data uses
        the loaders of `datamodule`, or of the module. Batch sizes, epochs, devices and precision
        come from the config.
        """
        from drivetrain.train.lightning.link import task_from

        return task_from(module, datamodule)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            rule = "is a model, but must be a function that builds one"
            remedy = "pass the function (model=make_model), which runs under the run's seed"
            raise ConfigError([Problem("Task.model", rule, remedy, type(self.model).__name__)])
        for name, remedy in _FUNCTIONS.items():
            given = getattr(self, name)
            may_be_left_out = name in ("metrics", "schedule")
            if isinstance(given, nn.Module) or not (
                callable(given) or (given is None and may_be_left_out)
            ):
                rule = "is not a function"
                raise ConfigError([Problem(f"Task.{name}", rule, remedy, type(given).__name__)])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Loss | PerSample | float]:
        """Return the metrics of one batch."""
        if self.metrics is not None:
            return self.metrics(model, batch)
        loss, parts = split(self.loss(model, batch))
        return {"loss": loss, **parts}

    def make_optimizer(self, model: nn.Module, optimization: Optimization) -> torch.optim.Optimizer:
        """Call the user's function with the arguments that its parameter names ask for.

        A torch optimizer class, bare or in a partial, gets no config section: its second parameter
        is a setting such as `lr`.
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
        wants_section = not is_class and len(names) != 1  # no names: a function of *arguments
        made = self.optimizer(first, optimization) if wants_section else self.optimizer(first)
        return as_one(made)


def split(found: Loss | LossAndParts) -> LossAndParts:
    """Return the loss and its parts; no parts if the user's function returned a loss alone."""
    return found if isinstance(found, tuple) else (found, {})
