"""LightningLink: connects a LightningModule to the run that trains it."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.adapter import Adapter
from drivetrain.train.evaluate import evaluating
from drivetrain.train.history import EvaluationResult
from drivetrain.train.lightning.adopted import Step, adopt, loss_in
from drivetrain.train.lightning.metrics import LoggedMetrics, MetricCalls, is_metric
from drivetrain.train.lightning.optimizers import read_optimizers
from drivetrain.train.lightning.refusals import check_module, overrides
from drivetrain.train.optimization.own_schedule import LRSchedule
from drivetrain.train.setup.model import Prebuilt
from drivetrain.train.task import Loss, LossAndParts, Task, Total
from drivetrain.train.trainer import Trainer


def task_from(module: Any, datamodule: Any = None) -> Task:
    """Build a task that calls the module as Lightning's Trainer would."""
    link = LightningLink(datamodule)
    given = isinstance(module, nn.Module)
    if given:
        check_module(module)
    return Task(
        model=_Given(module, link) if given else lambda: link.take(module()),
        loss=link.loss,
        optimizer=link.optimizer,
        schedule=link.schedule,
        metrics=link.metrics,
        summarize=link.logged_metrics,
        adapter=link,
    )


class _Given(Prebuilt):
    """A module that already exists; all ranks use rank 0's weights."""

    def __init__(self, module: nn.Module, link: LightningLink) -> None:
        super().__init__(module)
        link.take_early(module)
        object.__setattr__(self, "_link", link)

    def __call__(self) -> nn.Module:
        link: LightningLink = self._link  # type: ignore[attr-defined]
        taken: nn.Module = link.take(self.model)
        return taken


class _View:
    """The attributes of `self.trainer` that modules can use."""

    def __init__(self) -> None:
        self.config: RunConfig | None = None
        self.estimated_stepping_batches: float = math.inf
        self.run: Trainer | None = None

    @property
    def max_epochs(self) -> int | None:
        return self.config.num_train_epochs if self.config else None

    @property
    def max_steps(self) -> int:
        return (self.config.max_steps if self.config else None) or -1

    @property
    def accumulate_grad_batches(self) -> int:
        assembly = self.run.assembly if self.run else None
        return assembly.feed.plan.accumulation if assembly else 1

    @property
    def current_epoch(self) -> int:
        return self.run.epoch if self.run else 0

    @property
    def global_step(self) -> int:
        return self.run.step_number if self.run else 0

    @property
    def global_rank(self) -> int:
        return detect().rank

    @property
    def world_size(self) -> int:
        return detect().world_size

    @property
    def is_global_zero(self) -> bool:
        return detect().is_main

    @property
    def sanity_checking(self) -> bool:
        return False

    @property
    def training(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        known = sorted(each for each in vars(_View) if not each.startswith("_"))
        raise AttributeError(
            f"self.trainer.{name} does not exist here; available are {', '.join(known)} "
            "and estimated_stepping_batches"
        )


class LightningLink(Adapter):
    """Calls the module's hooks, collects what it logs and stands in for its trainer."""

    def __init__(self, datamodule: Any) -> None:
        self.view = _View()
        self.step: Step | None = None
        """The step being run."""
        self.logged_metrics = LoggedMetrics()
        self._datamodule = datamodule
        self._module: Any = None
        self._calls = MetricCalls()
        self._logged: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        self._schedule: LRSchedule | None = None
        self._in_step = 0
        """Micro-batches of this step, or batches of this evaluation, so far."""
        self._last: tuple[Any, Any, int] = (None, None, 0)

    # the task's functions

    def take_early(self, module: Any) -> None:
        """Adopt a module early, because it may provide the data."""
        self._module = adopt(module, self)

    def take(self, module: Any) -> Any:
        """Adopt a module and call its `prepare_data` and `setup`."""
        check_module(module)
        self._module = adopt(module, self)
        if overrides(type(module), "prepare_data"):
            _one_after_another(module.prepare_data)
        if overrides(type(module), "setup"):
            module.setup("fit")
        return module

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Return the optimizer of `configure_optimizers`."""
        made, self._schedule = read_optimizers(model.configure_optimizers())
        return made

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:  # noqa: ARG002 - made with the optimizer
        """Return the schedule that came with the optimizer, if any."""
        return self._schedule

    def loss(self, model: nn.Module, batch: Any) -> Loss | LossAndParts:
        """Return training_step's loss, with the values it logs as parts."""
        index = self._index_in_epoch()
        self._in_step += 1
        if self._call("on_train_batch_start", batch, index) == -1:
            rule, remedy = "returned -1 to skip the epoch", "call the Trainer's stop()"
            problem = Problem("on_train_batch_start", rule, remedy, has_value=False)
            raise ConfigError([problem])
        returned = model(Step.TRAINING, batch, index)
        if overrides(type(self._module), "on_train_batch_end"):
            self._last = (returned, batch, index)
        parts = {name: self._part(name, *said) for name, said in self._logged.items()}
        return (loss_in(returned), parts) if parts else loss_in(returned)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the values that validation_step logs."""
        if not overrides(type(self._module), Step.VALIDATION.value):
            rule, remedy = "is missing", "define it, or give fit() no validation data"
            raise ConfigError([Problem("validation_step", rule, remedy, has_value=False)])
        index, self._in_step = self._in_step, self._in_step + 1
        model(Step.VALIDATION, batch, index)
        values: dict[str, Any] = {}
        for name, (value, options) in self._logged.items():
            if is_metric(value):
                values |= self.logged_metrics.keep(name, value, self._calls.of(value, name))
            else:
                values[name] = _weighed(value, options)
        if not values:
            rule = "logged nothing, so there is nothing to report"
            problem = Problem("validation_step", rule, "call self.log(name, value)", None, False)
            raise ConfigError([problem])
        return values

    # while a step runs

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        """Context of a step: collect the values logged in it."""
        self.step, self._logged = step, {}
        try:
            with self._calls.watching(self._module):
                yield
        finally:
            self.step = None

    def log(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """`self.log`, in a step or in a hook."""
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            rule = f"uses reduce_fx={options['reduce_fx']!r}"
            remedy = "log a mean, or a torchmetrics object"
            raise ConfigError([Problem(f"self.log({name!r})", rule, remedy, has_value=False)])
        if self.step is None:
            if self.view.run is not None:
                self.view.run.log({name: value.compute() if is_metric(value) else value})
            return
        if self.step is Step.TRAINING and options.get("on_epoch"):
            self.say_once(
                f"self.log({name!r}, on_epoch=True): each step's value is recorded, but no mean "
                "over the epoch"
            )
        if isinstance(value, torch.Tensor):
            value = value.detach()
        self._logged[name] = (value, options)

    def log_all(self, dictionary: Any, options: Mapping[str, Any]) -> None:
        """`self.log_dict`."""
        if is_metric(dictionary) and self.step is Step.VALIDATION:
            # a collection: its values have their own names
            self.log(type(dictionary).__name__, dictionary, options)
            return
        for name, value in dictionary.items():
            self.log(name, value, options)

    def say_once(self, message: str) -> None:
        """Print a message once, on rank 0, while the run is active."""
        if self.view.run is not None:
            self.view.run.say_once(message)

    def _part(self, name: str, value: Any, options: Mapping[str, Any]) -> Any:
        if not is_metric(value):
            return _weighed(value, options)
        self.say_once(
            f"self.log({name!r}, metric) in training: the mean of its per-micro-batch values is "
            "recorded, not its value over the epoch"
        )
        found = getattr(value, "_forward_cache", None)  # Lightning reads it from here too
        if found is None:
            rule = "logs a metric that was updated but not called"
            remedy = "call it: self.accuracy(predictions, labels)"
            raise ConfigError([Problem(f"self.log({name!r})", rule, remedy, has_value=False)])
        return found

    def _index_in_epoch(self) -> int:
        """Return the index of the micro-batch in the epoch, as Lightning counts batches."""
        run = self.view.run
        if run is None or run.assembly is None or run.assembly.feed.plan.length is None:
            return self._in_step
        plan = run.assembly.feed.plan
        done = plan.position(run.step_number).samples // plan.global_batch_size
        return done * plan.accumulation + self._in_step

    # the run's hooks

    def on_planned(self, config: RunConfig, total_steps: int | None) -> None:
        """Set the values that `configure_optimizers` may read."""
        if config.parallel.pp > 1:
            rule = "a pipeline splits a model's forward, but a LightningModule's step does more"
            remedy = "use another axis, or Task(model=…, loss=…)"
            raise ConfigError([Problem("parallel.pp", rule, remedy, config.parallel.pp)])
        self.view.config = config
        self.view.estimated_stepping_batches = math.inf if total_steps is None else total_steps

    def data(self) -> tuple[Any, Any]:
        """Return the loaders of the datamodule, or of the module itself."""
        owner = self._datamodule
        if owner is not None:
            owner.trainer = self.view
            _one_after_another(owner.prepare_data)
            owner.setup("fit")
        elif self._module is not None and overrides(type(self._module), "train_dataloader"):
            owner = self._module
        if owner is None:
            return None, None
        return owner.train_dataloader(), _validation_data(owner, self._module)

    def on_setup(self, trainer: Trainer) -> None:
        self.view.run = trainer

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._call("on_fit_start")
        self._call("on_train_start")
        kind = type(self._module)
        if detect().world_size > 1 and overrides(kind, "on_validation_epoch_end"):
            self.say_once(
                "warning: on_validation_epoch_end sees only its own rank's samples; self.log in "
                "validation_step covers all ranks"
            )

    def on_train_epoch_start(self, trainer: Trainer, epoch: int) -> None:  # noqa: ARG002
        self._call("on_train_epoch_start")

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        self._in_step = 0

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        if trainer.assembly is not None:
            self._call("on_before_optimizer_step", trainer.assembly.engine.optimizer)

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        self._call("on_train_batch_end", *self._last)
        self._last = (None, None, 0)

    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:  # noqa: ARG002
        self._call("on_train_epoch_end")
        self._forget_samples()

    def on_validation_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        self._in_step = 0
        with evaluating(self._module), torch.no_grad():
            self._call("on_validation_start")
            self._call("on_validation_epoch_start")

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:  # noqa: ARG002
        with evaluating(self._module), torch.no_grad():
            self._call("on_validation_epoch_end")
            self._call("on_validation_end")
        self._forget_samples()

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._call("on_train_end")
        self._call("on_fit_end")

    def _call(self, name: str, *arguments: Any) -> Any:
        if overrides(type(self._module), name):
            return getattr(self._module, name)(*arguments)
        return None

    def _forget_samples(self) -> None:
        """Reset the metrics; their logged values are computed elsewhere."""
        for each in self._module.modules():
            if is_metric(each):
                each.reset()


def _weighed(value: Any, options: Mapping[str, Any]) -> Any:
    """Return a mean over the batch's samples, or over the `batch_size` that the user passed."""
    size = options.get("batch_size")
    if size is None:
        return value
    return Total(torch.as_tensor(value, dtype=torch.float32) * size, size)


def _validation_data(owner: Any, module: Any) -> Any:
    """Return the validation loader, or None if the module does not validate, as in Lightning."""
    if module is not None and not overrides(type(module), "validation_step"):
        return None
    try:
        loaders = owner.val_dataloader()
    except Exception as error:
        if type(error).__name__ == "MisconfigurationException":  # Lightning's, for a missing loader
            return None
        raise
    if isinstance(loaders, (list, tuple)):
        if len(loaders) > 1:
            rule = f"returned {len(loaders)} loaders"
            remedy = 'pass them by name: fit(train, {"news": news, "web": web})'
            raise ConfigError([Problem("val_dataloader", rule, remedy, has_value=False)])
        loaders = loaders[0] if loaders else None
    return loaders


def _one_after_another(prepare: Callable[[], None]) -> None:
    """Call `prepare_data` (downloads) on one rank of a node at a time; the first does the work."""
    name = f"drivetrain-{os.getuid()}-{type(getattr(prepare, '__self__', prepare)).__name__}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare()
