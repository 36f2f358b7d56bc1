"""RayTrainer: Ray's drop-in trainer, as thin a preset as PyTorchDDPTrainer.

    trainer = RayTrainer(model=model, num_workers=2, batch_size=32, epochs=10)
    history = trainer.fit(train_set, val_set)

From a driver it starts Ray Train's workers, and they run the same trainer; model and data travel to
them. Ray starts the workers again when one is lost, and the run's checkpoints say where they go on.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.compat.pytorch import DistributedConfig, LossOnOutputs, PyTorchDDPTrainer
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

    Args:
        model: The model; it comes back trained.
        num_workers: Ranks, one Ray Train worker each.
        use_gpu: Whether each has a GPU.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch; cross-entropy when left out.
        optimizer: Made from `model.parameters()`; AdamW when left out.
        scaling_config: Ray's own, for resources and placement; instead of the two above.
        settings: Any field of DistributedConfig, and `max_failures`: how often Ray may start again.
    """

    def __init__(
        self,
        model: nn.Module,
        num_workers: int = 1,
        use_gpu: bool = False,
        loss_fn: LossOnOutputs | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaling_config: ScalingConfig | None = None,
        **settings: Any,
    ) -> None:
        self._max_failures = int(settings.pop("max_failures", 3))
        self._scaling = scaling_config
        self._use_gpu = use_gpu
        wanted = num_workers if scaling_config is None else scaling_config.num_workers
        if not isinstance(wanted, int) or wanted < 1:
            rule = "must be a whole number from 1: batch_size is per rank, so ranks may not change"
            remedy = (
                "for an elastic run, state global_batch_size and use `drivetrain train --on ray`"
            )
            raise ConfigError([Problem("num_workers", rule, remedy, wanted)])
        config = settings.pop("config", None) or DistributedConfig()
        super().__init__(model, replace(config, num_gpus=wanted), loss_fn, optimizer, **settings)

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        max_steps: int | None = None,
    ) -> History:
        """Train on Ray's workers; returns in the driver, with the model trained."""
        if detect().environment == "ray":  # in a worker, its own or one of `--on ray`
            return super().fit(train_loader, val_loader, checkpoint_dir, max_steps)
        ray = require("ray", extra="ray")
        run = RunDirectory.create(Path(self.config.tensorboard_dir or "runs").absolute(), "ray")
        target = None if checkpoint_dir is None else str(Path(checkpoint_dir).absolute())
        given = ray.put((self, train_loader, val_loader, target, max_steps))
        history = self._drive(given, run)
        weights = read_weights(run.checkpoints)
        self.model.load_state_dict(weights)
        self.best_accuracy = history.best_accuracy
        return history

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


def _in_worker(config: dict[str, Any]) -> History:
    """What each Ray Train worker runs: the same trainer, in the run's directory."""
    ray = require("ray", extra="ray")
    os.environ[RUN_DIR] = config["run_dir"]
    trainer, train, val, checkpoint_dir, max_steps = ray.get(config["given"])
    history: History = trainer.fit(train, val, checkpoint_dir, max_steps)
    return history
