"""Drivetrain takes one training script from a laptop to thousands of devices.

    from drivetrain import Task, Trainer, load_config

Names are loaded on first use: importing the package takes milliseconds and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drivetrain._version import __version__
from drivetrain.core.deprecation import PUBLIC_NAMES, warn_renamed
from drivetrain.core.imports import without_collector

if TYPE_CHECKING:
    from drivetrain.compat.compression import GradientCompression
    from drivetrain.compat.deepspeed import DeepSpeedConfig
    from drivetrain.compat.horovod import HorovodTrainer
    from drivetrain.compat.hugging_face import config_from_training_arguments
    from drivetrain.compat.monitor import PerformanceMonitor
    from drivetrain.compat.notebook import notebook_launcher
    from drivetrain.compat.pytorch import PyTorchDDPTrainer
    from drivetrain.compat.ray import RayTrainer
    from drivetrain.compat.settings import DistributedConfig
    from drivetrain.compat.tensorflow import TensorFlowDistributedTrainer
    from drivetrain.config import ResolvedConfig, RunConfig, load_config
    from drivetrain.core.errors import (
        ConfigError,
        DamagedRun,
        DrivetrainError,
        EnvironmentProblem,
        NonFiniteLoss,
        NotSaved,
        Preempted,
        ReplicaDrift,
        SilentCorruption,
        WorkerFailure,
    )
    from drivetrain.parallel.gather import gather
    from drivetrain.record.reading import open_run
    from drivetrain.train.early_stopping import EarlyStopping
    from drivetrain.train.ema import EMA
    from drivetrain.train.history import EvaluationResult, History, StepMetrics
    from drivetrain.train.hooks import Hook
    from drivetrain.train.keep_loop import KeptLoop, prepare
    from drivetrain.train.optimization.muon import Muon
    from drivetrain.train.optimization.own_schedule import LRSchedule
    from drivetrain.train.outputs import PerSample
    from drivetrain.train.task import Task, Total
    from drivetrain.train.trainer import Trainer

_HOMES = {
    "ConfigError": "drivetrain.core.errors",
    "DamagedRun": "drivetrain.core.errors",
    "DeepSpeedConfig": "drivetrain.compat.deepspeed",
    "DistributedConfig": "drivetrain.compat.settings",
    "DrivetrainError": "drivetrain.core.errors",
    "EMA": "drivetrain.train.ema",
    "EarlyStopping": "drivetrain.train.early_stopping",
    "EnvironmentProblem": "drivetrain.core.errors",
    "EvaluationResult": "drivetrain.train.history",
    "GradientCompression": "drivetrain.compat.compression",
    "History": "drivetrain.train.history",
    "Hook": "drivetrain.train.hooks",
    "HorovodTrainer": "drivetrain.compat.horovod",
    "KeptLoop": "drivetrain.train.keep_loop",
    "LRSchedule": "drivetrain.train.optimization.own_schedule",
    "Muon": "drivetrain.train.optimization.muon",
    "NonFiniteLoss": "drivetrain.core.errors",
    "NotSaved": "drivetrain.core.errors",
    "PerSample": "drivetrain.train.outputs",
    "PerformanceMonitor": "drivetrain.compat.monitor",
    "Preempted": "drivetrain.core.errors",
    "PyTorchDDPTrainer": "drivetrain.compat.pytorch",
    "RayTrainer": "drivetrain.compat.ray",
    "ReplicaDrift": "drivetrain.core.errors",
    "ResolvedConfig": "drivetrain.config",
    "RunConfig": "drivetrain.config",
    "SilentCorruption": "drivetrain.core.errors",
    "StepMetrics": "drivetrain.train.history",
    "Task": "drivetrain.train.task",
    "TensorFlowDistributedTrainer": "drivetrain.compat.tensorflow",
    "Total": "drivetrain.train.task",
    "Trainer": "drivetrain.train.trainer",
    "WorkerFailure": "drivetrain.core.errors",
    "config_from_training_arguments": "drivetrain.compat.hugging_face",
    "gather": "drivetrain.parallel.gather",
    "load_config": "drivetrain.config",
    "notebook_launcher": "drivetrain.compat.notebook",
    "open_run": "drivetrain.record.reading",
    "prepare": "drivetrain.train.keep_loop",
}

__all__ = [
    "EMA",
    "ConfigError",
    "DamagedRun",
    "DeepSpeedConfig",
    "DistributedConfig",
    "DrivetrainError",
    "EarlyStopping",
    "EnvironmentProblem",
    "EvaluationResult",
    "GradientCompression",
    "History",
    "Hook",
    "HorovodTrainer",
    "KeptLoop",
    "LRSchedule",
    "Muon",
    "NonFiniteLoss",
    "NotSaved",
    "PerSample",
    "PerformanceMonitor",
    "Preempted",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "ReplicaDrift",
    "ResolvedConfig",
    "RunConfig",
    "SilentCorruption",
    "StepMetrics",
    "Task",
    "TensorFlowDistributedTrainer",
    "Total",
    "Trainer",
    "WorkerFailure",
    "__version__",
    "config_from_training_arguments",
    "gather",
    "load_config",
    "notebook_launcher",
    "open_run",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC_NAMES:
        warn_renamed(f"drivetrain.{name}", PUBLIC_NAMES[name])
        name = PUBLIC_NAMES[name].new
    if name not in _HOMES:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    with without_collector():
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
