"""RayTrainer: the drop-in trainer for Ray, a thin preset like PyTorchDDPTrainer.

    trainer = RayTrainer(model=model, num_workers=2, batch_size=32, epochs=10)
    history = trainer.fit(train_set, val_set)

In a driver it starts Ray Train workers, which receive the model and the data and run the same
trainer. If a worker is lost, Ray restarts the workers, and they resume from the run's checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.compat.pytorch import (
    LossOnOutputs,
    PyTorchDDPTrainer,
    Scheduler,
    open_mlflow_run,
)
from drivetrain.compat.settings import DistributedConfig, from_search
from drivetrain.core.errors import ConfigError, Problem, WorkerFailure
from drivetrain.core.requirements import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import RUN_DIR
from drivetrain.train.history import History
from drivetrain.train.saving.weights import read_weights

if TYPE_CHECKING:
    from ray.train import ScalingConfig


class RayTrainer(PyTorchDDPTrainer):
    """Trains a model on a Ray cluster: `fit(train_loader, val_loader)`.

    Ray chooses the cluster: `ray.init(...)` before, RAY_ADDRESS, or a local one on this machine.
    In a Ray Tune trial with one worker, the worker is the trial's own process.

    Args:
        model: The model; it is trained when fit() returns.
        config: Settings; or a search's parameters, of which those that are not settings are ignored
            here and left to the model.
        num_workers: Number of ranks, one Ray Train worker each.
        use_gpu: Whether each worker has a GPU.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch. Default: cross-entropy.
        optimizer: Created from `model.parameters()`. Default: AdamW.
        scheduler: A torch LR scheduler, stepped after each epoch.
        scaling_config: Ray's own ScalingConfig, for resources and placement, in place of
            `num_workers` and `use_gpu`.
        settings: Any field of DistributedConfig, and `max_failures`, the number of times Ray may
            restart the workers.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedConfig | Mapping[str, Any] | None = None,
        num_workers: int = 1,
        use_gpu: bool = False,
        loss_fn: LossOnOutputs | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Scheduler | None = None,
        scaling_config: ScalingConfig | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(config, int):
            rule, remedy = "is not a config", f"write num_workers={config}"
            raise ConfigError([Problem("config", rule, remedy, config)])
        self._max_failures = int(settings.pop("max_failures", 3))
        self._scaling = scaling_config
        self._use_gpu = use_gpu
        self._tracking_uri: str | None = None
        if isinstance(config, Mapping):
            config = dict(config)
            num_workers = config.pop("num_workers", num_workers)
        wanted = num_workers if scaling_config is None else scaling_config.num_workers
        if not isinstance(wanted, int) or wanted < 1:
            rule = "must be a whole number, at least 1: batch_size is per rank, so ranks are fixed"
            remedy = "for an elastic run, set global_batch_size and use `drivetrain train --on ray`"
            raise ConfigError([Problem("num_workers", rule, remedy, wanted)])
        if isinstance(config, Mapping):
            config = from_search(config)
        on_workers = replace(config or DistributedConfig(), num_gpus=wanted, backend="pytorch-ddp")
        super().__init__(model, on_workers, loss_fn, optimizer, scheduler, **settings)

    def _fit_here(
        self, train: Any, val: Any, checkpoint_dir: str | Path | None, max_steps: int | None
    ) -> History:
        if detect().environment == "ray" or (_is_in_ray() and self.config.num_ranks == 1):
            # in a Ray Train worker (its own or one of `--on ray`), or alone in a Ray Tune trial
            return super()._fit_here(train, val, checkpoint_dir, max_steps)
        ray = require("ray", extra="ray")
        if self.config.wants_mlflow:
            self._mlflow_run = open_mlflow_run(self.config)
            self._tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
        run = RunDirectory.create(Path(self.config.tensorboard_dir or "runs").absolute(), "ray")
        target = None if checkpoint_dir is None else str(Path(checkpoint_dir).absolute())
        given = ray.put((self, train, val, target, max_steps))
        history = self._drive(given, run)
        self.model.load_state_dict(read_weights(run.checkpoints))
        return history

    def use_tracking(self) -> None:
        """In a worker: use the driver's MLflow tracking URI."""
        if self._tracking_uri is not None:
            os.environ["MLFLOW_TRACKING_URI"] = self._tracking_uri

    def _drive(self, given: Any, run: RunDirectory) -> History:
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer

        scaling = self._scaling or ScalingConfig(
            num_workers=self.config.num_ranks, use_gpu=self._use_gpu
        )
        trainer = TorchTrainer(
            _in_worker,
            train_loop_config={"given": given, "run_dir": str(run.path)},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if scaling.use_gpu else "gloo"),
            scaling_config=scaling,
            run_config=RunConfig(
                name="ray",
                storage_path=str(run.path),
                failure_config=FailureConfig(max_failures=self._max_failures),
            ),
        )
        try:
            history: History = trainer.fit().return_value
        except TrainingFailedError as error:
            raise WorkerFailure(str(error)) from error
        return history


def _is_in_ray() -> bool:
    """True if Ray started this process, as a task, an actor or a trial."""
    return "RAY_RAYLET_PID" in os.environ


def _in_worker(config: dict[str, Any]) -> History:
    """Run the same trainer in a Ray Train worker, in the run's directory."""
    ray = require("ray", extra="ray")
    os.environ[RUN_DIR] = config["run_dir"]
    trainer, train, val, checkpoint_dir, max_steps = ray.get(config["given"])
    trainer.use_tracking()
    history: History = trainer.fit(train, val, checkpoint_dir, max_steps)
    return history
