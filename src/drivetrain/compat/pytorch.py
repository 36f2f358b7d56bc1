"""PyTorchDDPTrainer: the drop-in trainer for PyTorch, a thin preset over Trainer.

    trainer = PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=32, epochs=10)
    history = trainer.fit(train_loader, val_loader, checkpoint_dir="checkpoints")

`batch_size` is per rank here, as is common in such trainers; it determines the global batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.cluster.environments import Identity, detect
from drivetrain.compat.relaunch import local_ranks
from drivetrain.compat.settings import DistributedConfig, with_settings
from drivetrain.config.schema import Data
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.sources import source_from
from drivetrain.train.history import History
from drivetrain.train.hooks import Hook
from drivetrain.train.optimization.given import GivenOptimizer
from drivetrain.train.optimization.own_schedule import (
    LRSchedule,
    ScheduleFactory,
    as_factory,
)
from drivetrain.train.saving.weights import write_weights
from drivetrain.train.setup.model import Prebuilt
from drivetrain.train.task import Loss, Task, Total
from drivetrain.train.trainer import Trainer

__all__ = ["DistributedConfig", "LossOnOutputs", "PyTorchDDPTrainer", "Scheduler", "WriteWeights"]

LossOnOutputs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Scheduler = LRScheduler | LRSchedule | ScheduleFactory


class PyTorchDDPTrainer:
    """Trains a model: `fit(train_loader, val_loader)`.

    Under plain `python`, fit() starts the other ranks itself. Under `drivetrain train`, torchrun,
    Slurm or Kubernetes it uses the ranks that the launcher started.

    Args:
        model: The model; every rank starts from rank 0's weights.
        config: Settings; keyword arguments override them.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch. Default: cross-entropy.
        optimizer: Created from `model.parameters()`. Default: the scheduler's, or AdamW.
        scheduler: A torch LR scheduler, stepped after each epoch (ReduceLROnPlateau: after each
            evaluation). Pass an `LRSchedule` to change that.
        settings: Any field of DistributedConfig.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedConfig | None = None,
        loss_fn: LossOnOutputs | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.config = with_settings(config or DistributedConfig(), settings)
        self.history: History | None = None
        """History of the last fit()."""
        self.best_accuracy: float | None = None
        self._loss_fn = loss_fn or F.cross_entropy
        self._scheduler = None if scheduler is None else _each_epoch(scheduler)
        self._optimizer = optimizer or getattr(scheduler, "optimizer", None)
        self._mlflow_run: str | None = None
        if scheduler is not None:
            self._refuse_two_schedules()

    def _refuse_two_schedules(self) -> None:
        names = ("learning_rate_scaling", "warmup_epochs", "warmup_steps")
        unset = DistributedConfig()
        rule, remedy = "the scheduler sets the rate", "add a warm-up to it, or leave this out"
        problems = [
            Problem(name, rule, remedy, getattr(self.config, name))
            for name in names
            if getattr(self.config, name) != getattr(unset, name)
        ]
        if problems:
            raise ConfigError(problems)

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        max_steps: int | None = None,
        mlflow_experiment: str | None = None,
    ) -> History:
        """Train on all ranks; return on each rank, with the model trained."""
        if mlflow_experiment is not None:
            self.config = replace(self.config, mlflow_experiment=mlflow_experiment)
        fit = self._fit_on_ray if self.config.backend == "ray" else self._fit_here
        self.history = fit(train_loader, val_loader, checkpoint_dir, max_steps)
        self.best_accuracy = self.history.best_accuracy
        return self.history

    def _fit_on_ray(
        self, train: Any, val: Any, checkpoint_dir: str | Path | None, max_steps: int | None
    ) -> History:
        from drivetrain.compat.ray import RayTrainer  # a subclass of this class

        given = (self._loss_fn, self._optimizer, self._scheduler)
        use_gpu = torch.accelerator.is_available()
        trainer = RayTrainer(self.model, self.config, self.config.num_ranks, use_gpu, *given)
        return trainer.fit(train, val, checkpoint_dir, max_steps)

    def _fit_here(
        self, train: Any, val: Any, checkpoint_dir: str | Path | None, max_steps: int | None
    ) -> History:
        identity = detect()
        wanted = self.config.num_ranks
        starts_ranks = identity.world_size == 1 and wanted > 1
        if starts_ranks:
            self._refuse_several_nodes()
        target = checkpoint_dir or self.config.checkpoint_dir
        if self.config.resume_from_checkpoint is True and target is None:
            rule, remedy = "there is no directory to resume from", "set checkpoint_dir"
            raise ConfigError([Problem("resume_from_checkpoint", rule, remedy, value=True)])
        settings = replace(self.config, checkpoint_dir=None if target is None else str(target))
        ranks = (wanted, wanted) if starts_ranks else _ranks(identity)
        per_epoch = steps_per_epoch(train, self.config, ranks[0])
        run_config = {**self._run_config(settings, *ranks, per_epoch), "max_steps": max_steps}
        hooks = [WriteWeights(Path(target))] if target is not None else []
        trainer = Trainer(self._task(), run_config, hooks)
        with local_ranks(wanted) if starts_ranks else nullcontext():
            return trainer.fit(train, val)

    def _refuse_several_nodes(self) -> None:
        if self.config.num_nodes > 1:
            rule = "a run on several nodes needs a launcher on each"
            remedy = "run `drivetrain train --nnodes …` on every node"
            raise ConfigError([Problem("num_nodes", rule, remedy, self.config.num_nodes)])

    def _run_config(
        self,
        config: DistributedConfig,
        num_ranks: int,
        ranks_per_node: int | None = None,
        per_epoch: int | None = None,
    ) -> dict[str, Any]:
        said = config.run_config(num_ranks, ranks_per_node, per_epoch)
        if self._optimizer is not None and config.learning_rate == DistributedConfig.learning_rate:
            del said["optimization"]["learning_rate"]  # not set, and the optimizer has its own
        if config.wants_mlflow:
            said["record"]["mlflow"]["run_id"] = self._mlflow_run or open_mlflow_run(config)
        return said

    def _task(self) -> Task:
        task = Task(model=Prebuilt(self.model), loss=self._loss, metrics=self._metrics)
        if self._optimizer is not None:
            task = replace(task, optimizer=GivenOptimizer(self._optimizer, self.model))
        if self._scheduler is not None:
            task = replace(task, schedule=as_factory(self._scheduler))
        return task

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return self._loss_fn(model(inputs), targets)

    def _metrics(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        inputs, targets = batch
        outputs = model(inputs)
        metrics: dict[str, Loss] = {"loss": self._loss_fn(outputs, targets)}
        if outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point():
            right = (outputs.argmax(1) == targets).sum()
            metrics["accuracy"] = Total(right, len(targets))
        return metrics


class WriteWeights(Hook):
    """Writes the trained weights to one more directory, as weights.pt."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "weights.pt"

    def on_fit_end(self, trainer: Trainer) -> None:
        """Gather the weights on all ranks and write them on rank 0."""
        if trainer.assembly is not None:
            write_weights(trainer.assembly, self._path)


def _each_epoch(scheduler: Scheduler) -> Scheduler:
    """Make a plain torch scheduler step once per epoch, which is common in such trainers."""
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        return LRSchedule(scheduler, every="epoch")
    return scheduler


def _ranks(identity: Identity) -> tuple[int, int]:
    """Return the number of ranks, and the number per node; if uneven, this node's number."""
    return identity.world_size, max(1, identity.local_world_size)


def steps_per_epoch(data: Any, config: DistributedConfig, num_ranks: int) -> int | None:
    """Return the steps in an epoch; None if the data has no length."""
    samples = source_from(data, Data()).epoch_length(config.batch_size)
    return None if samples is None else -(-samples // config.global_batch_size(num_ranks))


def open_mlflow_run(config: DistributedConfig) -> str | None:
    """Return the id of the run that the script opened with `mlflow.start_run()`, if any."""
    mlflow: Any = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if run is None:
        return None
    if config.mlflow_experiment is not None:
        name = mlflow.get_experiment(run.info.experiment_id).name
        if name != config.mlflow_experiment:
            rule = f"the open MLflow run belongs to {name}"
            remedy = "call mlflow.set_experiment() before opening it, or leave this out"
            problem = Problem("mlflow_experiment", rule, remedy, config.mlflow_experiment)
            raise ConfigError([problem])
    return str(run.info.run_id)
