"""RayTrainer: Ray's drop-in trainer, as thin a preset as PyTorchDDPTrainer.

    trainer = RayTrainer(model=model, num_workers=2, batch_size=32, epochs=10)
    history = trainer.fit(train_set, val_set)

From a driver it starts Ray Train's workers, and they run the same trainer; model and data travel to
them. Ray starts the workers again when one is lost, and the run's checkpoints say where they go on.
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
    """A model, some settings, `fit(train_loader, val_loader)`, on a Ray cluster.

    Which cluster is Ray's own matter: `ray.init(...)` before, RAY_ADDRESS, or one of this machine.
    In a trial of Ray Tune one worker is the trial's own process.

    Args:
        model: The model; it comes back trained.
        config: Settings; or what a search has drawn, of which the model's own values are left to
            it.
        num_workers: Ranks, one Ray Train worker each.
        use_gpu: Whether each has a GPU.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch; cross-entropy when left out.
        optimizer: Made from `model.parameters()`; AdamW when left out.
        scheduler: A torch LR scheduler, stepped after each epoch.
        scaling_config: Ray's own, for resources and placement; instead of the two above.
        settings: Any field of DistributedConfig, and `max_failures`: how often Ray may start again.
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
            rule, remedy = "is no config", f"write num_workers={config}"
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
            rule = "must be a whole number from 1: batch_size is per rank, so ranks may not change"
            remedy = (
                "for an elastic run, state global_batch_size and use `drivetrain train --on ray`"
            )
            raise ConfigError([Problem("num_workers", rule, remedy, wanted)])
        if isinstance(config, Mapping):
            config = from_search(config)
        on_workers = replace(config or DistributedConfig(), num_gpus=wanted, backend="pytorch-ddp")
        super().__init__(model, on_workers, loss_fn, optimizer, scheduler, **settings)

    def _fit_here(
        self, train: Any, val: Any, checkpoint_dir: str | Path | None, max_steps: int | None
    ) -> History:
        if detect().environment == "ray" or (_is_in_ray() and self.config.num_ranks == 1):
            # in a worker, its own or one of `--on ray`; or alone in a trial of Ray Tune
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
        """In a worker: MLflow is where the driver has it."""
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
    """Whether Ray has started this process: as a task, an actor or a trial."""
    return "RAY_RAYLET_PID" in os.environ


def _in_worker(config: dict[str, Any]) -> History:
    """What each Ray Train worker runs: the same trainer, in the run's directory."""
    ray = require("ray", extra="ray")
    os.environ[RUN_DIR] = config["run_dir"]
    trainer, train, val, checkpoint_dir, max_steps = ray.get(config["given"])
    trainer.use_tracking()
    history: History = trainer.fit(train, val, checkpoint_dir, max_steps)
    return history
