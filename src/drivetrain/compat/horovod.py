"""HorovodTrainer: the drop-in trainer for Horovod, a thin preset like PyTorchDDPTrainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.compat.pytorch import LossOnOutputs, PyTorchDDPTrainer, Scheduler
from drivetrain.compat.settings import DistributedConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.history import History


class HorovodTrainer(PyTorchDDPTrainer):
    """Trains a model with Horovod: `fit(train_loader, epochs=…)`, with or without `horovodrun`.

    Args:
        model: The model; every rank starts from rank 0's weights.
        optimizer: Created from `model.parameters()`. Default: AdamW.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch. Default: cross-entropy.
        compression: "none", "fp16", or `hvd.Compression.none` or `hvd.Compression.fp16`.
        verbose: Whether this rank may show progress.
        scheduler: A torch LR scheduler, stepped after each epoch.
        settings: Any field of DistributedConfig.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossOnOutputs | None = None,
        compression: Any = "none",
        verbose: bool = True,
        scheduler: Scheduler | None = None,
        **settings: Any,
    ) -> None:
        config = DistributedConfig(backend="horovod", compression=_name_of(compression))
        super().__init__(model, config, loss_fn, optimizer, scheduler, **settings)
        self._verbose = verbose

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        max_steps: int | None = None,
        mlflow_experiment: str | None = None,
        epochs: int | None = None,
    ) -> History:
        """Train on all ranks; return on each rank, with the model trained."""
        if epochs is not None:
            self.config = replace(self.config, epochs=epochs)
        return super().fit(train_loader, val_loader, checkpoint_dir, max_steps, mlflow_experiment)

    def metric_average(self, value: float | torch.Tensor, name: str) -> float:
        """Return the mean of a number over all ranks. A collective call; use it after fit()."""
        from drivetrain.strategies.horovod.rendezvous import load_horovod

        hvd = load_horovod()
        if not hvd.is_initialized():
            return float(value)
        number = torch.tensor(float(value), dtype=torch.float64)
        return float(hvd.allreduce(number, name=name, op=hvd.Average))

    def _run_config(
        self,
        config: DistributedConfig,
        num_ranks: int,
        ranks_per_node: int | None = None,
        per_epoch: int | None = None,
    ) -> dict[str, Any]:
        run_config = super()._run_config(config, num_ranks, ranks_per_node, per_epoch)
        if not self._verbose:
            run_config["record"]["progress"] = "none"
        return run_config


def _name_of(compression: Any) -> str:
    """Return "none" or "fp16"; hvd.Compression's members are NoneCompressor and FP16Compressor."""
    given = compression if isinstance(compression, str) else getattr(compression, "__name__", "")
    name = given.removesuffix("Compressor").lower()
    if name not in ("none", "fp16"):
        problem = Problem("compression", "not supported", 'use "none" or "fp16"', str(compression))
        raise ConfigError([problem])
    return name
