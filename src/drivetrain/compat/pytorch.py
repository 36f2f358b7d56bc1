"""Drop-in trainers under the names the field's documents use: thin presets over Trainer.

    trainer = PyTorchDDPTrainer(model=model, num_gpus=4, batch_size=32, epochs=10)
    history = trainer.fit(train_loader, val_loader, checkpoint_dir="checkpoints")

`batch_size` is per rank here, as those documents have it; the global batch follows from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.compat.relaunch import local_ranks
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.accelerator import accelerator_type, num_devices
from drivetrain.train.history import History
from drivetrain.train.hooks import Hook
from drivetrain.train.optimization.given import GivenOptimizer
from drivetrain.train.saving.weights import write_weights
from drivetrain.train.setup.model import Prebuilt
from drivetrain.train.task import Loss, Task, Total
from drivetrain.train.trainer import Trainer

_STRATEGIES = {
    "pytorch-ddp": "ddp",
    "pytorch-fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
}
_PRECISIONS: dict[bool | str, str] = {
    False: "fp32",
    True: "fp16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
_COMMUNICATION = ("auto", "gloo", "nccl")
_NOT_YET = {
    "mlflow_tracking": "use tensorboard=True",
    "mlflow_experiment": "use tensorboard=True",
}

LossOnOutputs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DistributedConfig:
    """Settings by the names the field's documents use; `run_config` says them in ours."""

    num_gpus: int | None = None
    """Ranks in all; None: one per CUDA device, or one. Without CUDA they are CPU processes."""
    num_nodes: int = 1
    gpus_per_node: int | None = None
    backend: str = "pytorch-ddp"
    """pytorch-ddp, pytorch-fsdp, deepspeed or horovod."""
    batch_size: int = 32
    """Per rank and micro-batch."""
    epochs: int = 1
    learning_rate: float = 1e-3
    mixed_precision: bool | str = False
    """True or "fp16", with loss scaling; "bf16"."""
    scaler_init_scale: float = 65536.0
    scaler_growth_interval: int = 2000
    gradient_accumulation_steps: int = 1
    gradient_clipping: float | None = None
    communication_backend: str = "auto"
    """auto follows the device: nccl for CUDA, gloo for the CPU."""
    find_unused_parameters: bool = False
    seed: int = 42
    checkpoint_dir: str | None = None
    """The trained weights are written here; checkpoints too, with one of the next two."""
    tensorboard: bool = True
    tensorboard_dir: str | None = None
    """Run directories, TensorBoard's files inside them, are made here; None: ./runs."""
    log_every_n_steps: int = 10
    checkpoint_frequency: int | None = None
    """Save each so many steps; None: as often as pays."""
    resume_from_checkpoint: bool | str = False
    """True: from the newest checkpoint in checkpoint_dir; or a run's directory."""
    zero_stage: int | None = None
    """DeepSpeed's ZeRO stage, 1 to 3; makes the backend deepspeed, as does the next."""
    deepspeed_config: str | Path | dict[str, Any] | None = None
    """A DeepSpeed JSON file, or its contents."""
    compression: str = "none"
    """Of gradients on their way, with backend horovod: none or fp16."""
    # Known from the field's documents, and refused in this release rather than ignored:
    mlflow_tracking: bool = False
    mlflow_experiment: str | None = None

    def __post_init__(self) -> None:
        """Answer everything that cannot be honoured, at once."""
        problems = [
            Problem(name, "not available in this release", remedy, getattr(self, name))
            for name, remedy in _NOT_YET.items()
            if getattr(self, name)
        ]
        if self.backend not in _STRATEGIES:
            problems.append(_choice("backend", self.backend, tuple(_STRATEGIES)))
        if self._wants_deepspeed and self.backend in ("pytorch-fsdp", "horovod"):
            problems.append(
                Problem(
                    "backend",
                    "zero_stage and deepspeed_config are DeepSpeed's",
                    'use backend="deepspeed", or leave them out',
                    self.backend,
                )
            )
        if self.communication_backend not in _COMMUNICATION:
            problems.append(
                _choice("communication_backend", self.communication_backend, _COMMUNICATION)
            )
        if self.mixed_precision not in _PRECISIONS:
            options = ("True", "False", "fp16", "bf16")
            problems.append(_choice("mixed_precision", str(self.mixed_precision), options))
        usual = dist.get_default_backend_for_device(accelerator_type())
        if self.communication_backend == "gloo" and usual != "gloo":
            problems.append(_choice("communication_backend", "gloo", (f"auto, with {usual}",)))
        if self.communication_backend == "nccl" and usual != "nccl":
            problems.append(
                Problem(
                    "communication_backend",
                    "needs CUDA devices, and there are none",
                    'use "auto", which takes gloo on the CPU',
                    "nccl",
                )
            )
        if problems:
            raise ConfigError(sorted(problems, key=str))

    @property
    def _wants_deepspeed(self) -> bool:
        return self.zero_stage is not None or self.deepspeed_config is not None

    def _checkpoint(self) -> dict[str, Any]:
        """Resumable ones go to checkpoint_dir when somebody asked for them."""
        wanted = bool(self.checkpoint_frequency or self.resume_from_checkpoint)
        resume = self.resume_from_checkpoint
        return {
            "every_steps": self.checkpoint_frequency or "auto",
            "directory": self.checkpoint_dir if wanted else None,
            "resume_from": self.checkpoint_dir if resume is True else resume or None,
        }

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        if self.num_gpus is not None:
            return self.num_gpus
        per_node = self.gpus_per_node or max(1, num_devices())
        return per_node * self.num_nodes

    def run_config(self, num_ranks: int) -> dict[str, Any]:
        """The same in Drivetrain's words."""
        return {
            "global_batch_size": self.batch_size * self.gradient_accumulation_steps * num_ranks,
            "micro_batch_size": self.batch_size,
            "num_train_epochs": self.epochs,
            "seed": self.seed,
            "output_dir": self.tensorboard_dir or "runs",
            "optimization": {
                "learning_rate": self.learning_rate,
                "max_grad_norm": self.gradient_clipping,
            },
            "precision": {
                "dtype": _PRECISIONS[self.mixed_precision],
                "scaler": {
                    "init_scale": self.scaler_init_scale,
                    "growth_interval": self.scaler_growth_interval,
                },
            },
            "parallel": {
                "strategy": "deepspeed" if self._wants_deepspeed else _STRATEGIES[self.backend],
                "ddp": {"find_unused_parameters": self.find_unused_parameters},
                "deepspeed": {"zero_stage": self.zero_stage, "config": self.deepspeed_config},
                "horovod": {"compression": self.compression},
            },
            "checkpoint": self._checkpoint(),
            "record": {
                "logging_steps": self.log_every_n_steps,
                "sinks": ["tensorboard"] if self.tensorboard else [],
            },
        }


class PyTorchDDPTrainer:
    """A model, some settings, `fit(train_loader, val_loader)`.

    Started by plain `python`, fit() starts the other ranks itself; under `drivetrain train`,
    torchrun, Slurm or Kubernetes it uses the ranks that are there.

    Args:
        model: The model; every rank starts from rank 0's weights.
        config: Settings; those given by name win over it.
        loss_fn: `loss_fn(outputs, targets)`, a mean over the batch; cross-entropy when left out.
        optimizer: Made from `model.parameters()`; AdamW when left out.
        settings: Any field of DistributedConfig.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DistributedConfig | None = None,
        loss_fn: LossOnOutputs | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **settings: Any,
    ) -> None:
        self.model = model
        self.config = _with_settings(config or DistributedConfig(), settings)
        self.best_accuracy: float | None = None
        self._loss_fn = loss_fn or F.cross_entropy
        self._optimizer = optimizer

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        checkpoint_dir: str | Path | None = None,
        max_steps: int | None = None,
    ) -> History:
        """Train on all ranks; returns on each of them, with the model trained."""
        identity = detect()
        wanted = self.config.num_ranks
        starts_ranks = identity.world_size == 1 and wanted > 1
        num_ranks = wanted if starts_ranks else identity.world_size
        if starts_ranks and self.config.num_nodes > 1:
            raise ConfigError(
                [
                    Problem(
                        "num_nodes",
                        "several nodes need a launcher on each",
                        "run `drivetrain train --nnodes …` on every node",
                        self.config.num_nodes,
                    )
                ]
            )
        target = checkpoint_dir or self.config.checkpoint_dir
        if self.config.resume_from_checkpoint is True and target is None:
            rule, remedy = "there is no place to resume from", "give checkpoint_dir"
            raise ConfigError([Problem("resume_from_checkpoint", rule, remedy, value=True)])
        settings = replace(self.config, checkpoint_dir=None if target is None else str(target))
        run_config = {**self._run_config(settings, num_ranks), "max_steps": max_steps}
        hooks = [WriteWeights(Path(target))] if target is not None else []
        trainer = Trainer(self._task(), run_config, hooks)
        with local_ranks(num_ranks) if starts_ranks else nullcontext():
            history = trainer.fit(train_loader, val_loader)
        self.best_accuracy = history.best_accuracy
        return history

    def _run_config(self, config: DistributedConfig, num_ranks: int) -> dict[str, Any]:
        return config.run_config(num_ranks)

    def _task(self) -> Task:
        task = Task(model=Prebuilt(self.model), loss=self._loss, metrics=self._metrics)
        if self._optimizer is not None:
            task = replace(task, optimizer=GivenOptimizer(self._optimizer, self.model))
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
    """The trained weights in one more place."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "weights.pt"

    def on_fit_end(self, trainer: Trainer) -> None:
        """All ranks gather, rank 0 writes."""
        if trainer.assembly is not None:
            write_weights(trainer.assembly, self._path)


def _with_settings(config: DistributedConfig, settings: dict[str, Any]) -> DistributedConfig:
    known = [field.name for field in fields(DistributedConfig)]
    problems = []
    for name in sorted(settings.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        problems.append(Problem(name, "unknown setting", remedy, settings[name]))
    if problems:
        raise ConfigError(problems)
    return replace(config, **settings)


def _choice(name: str, value: str, options: tuple[str, ...]) -> Problem:
    return Problem(name, "not available in this release", f"use {' or '.join(options)}", value)
