"""DistributedConfig: the drop-in trainers' settings, converted to Drivetrain's config keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from drivetrain.compat.compression import GradientCompression
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.accelerator import accelerator_type, num_devices

_STRATEGIES = {
    "pytorch-ddp": "ddp",
    "pytorch-fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
    "ray": "ddp",
}
_PRECISIONS: dict[bool | str, str] = {
    False: "fp32",
    True: "fp16",
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
}
_COMMUNICATION = ("auto", "gloo", "nccl")
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
_SYNONYMS = {"lr": "learning_rate"}
"""Short names that searches commonly use for settings."""


class Places(NamedTuple):
    """The sizes that convert settings in epochs and nodes to steps and ranks."""

    num_ranks: int
    ranks_per_node: int | None = None
    """None: all ranks on one node."""
    steps_per_epoch: int | None = None
    """None: a stream, whose length is not known."""


@dataclass(frozen=True)
class DistributedConfig:
    """Settings of the drop-in trainers; `run_config` converts them to Drivetrain's config keys."""

    num_gpus: int | None = None
    """Total number of ranks. None: `gpus_per_node`, or one per device (at least one), times
    `num_nodes`. Without devices, ranks are CPU processes."""
    num_nodes: int = 1
    gpus_per_node: int | None = None
    backend: str = "pytorch-ddp"
    """pytorch-ddp, pytorch-fsdp, deepspeed, horovod, or ray (pytorch-ddp on Ray's workers)."""
    sharding_strategy: Any = None
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD, as in torch; selects pytorch-fsdp."""
    batch_size: int = 32
    """Samples per rank and micro-batch."""
    epochs: int = 1
    learning_rate: float = 1e-3
    learning_rate_scaling: str = "none"
    """linear or sqrt: scale by the ratio of the global batch to base_batch_size."""
    base_batch_size: int | None = None
    """The global batch that learning_rate is for. None: one rank's, so it scales with the ranks."""
    warmup_epochs: int = 0
    """Number of epochs over which the learning rate rises from 0. Set this or `warmup_steps`."""
    warmup_steps: int = 0
    mixed_precision: bool | str = False
    """True or "fp16" (with loss scaling), or "bf16"."""
    scaler_init_scale: float = 65536.0
    scaler_growth_interval: int = 2000
    gradient_accumulation_steps: int = 1
    gradient_clipping: float | None = None
    communication_backend: str = "auto"
    """auto follows the device: nccl for CUDA, gloo for the CPU."""
    find_unused_parameters: bool = False
    seed: int = 42
    checkpoint_dir: str | None = None
    """Directory for the trained weights, and for checkpoints if `checkpoint_frequency`,
    `checkpoint_every_n_steps` or `resume_from_checkpoint` is set."""
    tensorboard: bool = True
    tensorboard_dir: str | None = None
    """Directory for run directories, which contain TensorBoard's files. None: ./runs."""
    log_every_n_steps: int = 10
    checkpoint_frequency: int | None = None
    """Number of epochs between checkpoints. None: the interval that loses the least time."""
    checkpoint_every_n_steps: int | None = None
    """The same in steps."""
    resume_from_checkpoint: bool | str = False
    """True: resume from the newest checkpoint in checkpoint_dir. Or a run's directory."""
    zero_stage: int | None = None
    """DeepSpeed's ZeRO stage, 1 to 3. This and `deepspeed_config` select the backend deepspeed."""
    deepspeed_config: Any = None
    """A DeepSpeed JSON file, its contents, or a DeepSpeedConfig."""
    compression: str | GradientCompression = "none"
    """Gradient compression: none or fp16; without Horovod also bf16, powersgd, topk, auto."""
    mlflow_tracking: bool = False
    """Log to MLflow: to the run that `mlflow.start_run()` opened, or to a new run."""
    mlflow_experiment: str | None = None
    """Name of the MLflow experiment; also turns MLflow logging on."""

    def __post_init__(self) -> None:
        """Raise one ConfigError for all settings that are not supported."""
        if problems := sorted([*self._choices(), *self._communication(), *self._pairs()], key=str):
            raise ConfigError(problems)

    def _choices(self) -> Iterator[Problem]:
        if self.backend == "tensorflow":
            rule, remedy = "trains Keras models, but this trainer takes torch's", "use pytorch-ddp"
            yield Problem("backend", rule, remedy, self.backend)
        elif self.backend not in _STRATEGIES:
            yield _choice("backend", self.backend, tuple(_STRATEGIES))
        if self.mixed_precision not in _PRECISIONS:
            options = ("True", "False", "fp16", "bf16")
            yield _choice("mixed_precision", str(self.mixed_precision), options)
        if self.sharding_strategy is not None and self._sharding not in _SHARDING:
            public = tuple(name for name in _SHARDING if not name.startswith("_"))
            yield _choice("sharding_strategy", self._sharding, public)

    def _communication(self) -> Iterator[Problem]:
        wanted = self.communication_backend
        usual = dist.get_default_backend_for_device(accelerator_type())
        if wanted == "mpi":
            has_it = dist.is_mpi_available()
            rule = (
                "is not supported between ranks" if has_it else "this torch was built without MPI"
            )
            remedy = 'use "auto": NCCL and gloo use the same network, and need no mpirun'
            yield Problem("communication_backend", rule, remedy, wanted)
        elif wanted not in _COMMUNICATION:
            yield _choice("communication_backend", wanted, _COMMUNICATION)
        elif wanted == "gloo" and usual != "gloo":
            yield _choice("communication_backend", "gloo", (f"auto, with {usual}",))
        elif wanted == "nccl" and usual != "nccl":
            remedy = 'use "auto", which uses gloo on the CPU'
            rule = "needs CUDA devices, but there are none"
            yield Problem("communication_backend", rule, remedy, "nccl")

    def _pairs(self) -> Iterator[Problem]:
        """Check settings that exclude each other."""
        if self._wants_deepspeed and self.backend in ("pytorch-fsdp", "horovod"):
            rule = "zero_stage and deepspeed_config are DeepSpeed settings"
            remedy = 'use backend="deepspeed", or leave them out'
            yield Problem("backend", rule, remedy, self.backend)
        others = self.backend not in ("pytorch-ddp", "pytorch-fsdp", "ray") or self._wants_deepspeed
        if self.sharding_strategy is not None and others:
            rule = "is an FSDP setting, but this run uses another backend"
            remedy = 'use backend="pytorch-fsdp", or leave it out'
            yield Problem("sharding_strategy", rule, remedy, self._sharding)
        if self.checkpoint_frequency and self.checkpoint_every_n_steps:
            rule, remedy = "checkpoint_every_n_steps is set as well", "set one of them"
            yield Problem("checkpoint_frequency", rule, remedy, self.checkpoint_frequency)
        if self.warmup_epochs and self.warmup_steps:
            rule, remedy = "warmup_steps is set as well", "set one of them"
            yield Problem("warmup_epochs", rule, remedy, self.warmup_epochs)

    @property
    def _sharding(self) -> str:
        """The name of torch's enum member, or the text that was passed."""
        given = self.sharding_strategy
        return str(getattr(given, "name", given))

    @property
    def _wants_deepspeed(self) -> bool:
        return self.zero_stage is not None or self.deepspeed_config is not None

    @property
    def wants_mlflow(self) -> bool:
        """True if anything is logged to MLflow."""
        return self.mlflow_tracking or self.mlflow_experiment is not None

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        if self.num_gpus is not None:
            return self.num_gpus
        per_node = self.gpus_per_node or max(1, num_devices())
        return per_node * self.num_nodes

    def global_batch_size(self, num_ranks: int) -> int:
        """Return the number of samples in a step."""
        return self.batch_size * self.gradient_accumulation_steps * num_ranks

    def run_config(
        self,
        num_ranks: int,
        ranks_per_node: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> dict[str, Any]:
        """Return the same settings as a Drivetrain config."""
        where = Places(num_ranks, ranks_per_node, steps_per_epoch)
        return {
            "global_batch_size": self.global_batch_size(num_ranks),
            "micro_batch_size": self.batch_size,
            "num_train_epochs": self.epochs,
            "seed": self.seed,
            "output_dir": self.tensorboard_dir or "runs",
            "optimization": {
                "learning_rate": self.learning_rate,
                "learning_rate_scaling": self.learning_rate_scaling,
                "base_batch_size": self.base_batch_size or self.global_batch_size(1),
                "warmup_steps": self.warmup_steps
                or _in_steps("warmup_epochs", self.warmup_epochs, "warmup_steps", where),
                "max_grad_norm": self.gradient_clipping,
            },
            "precision": {
                "dtype": _PRECISIONS[self.mixed_precision],
                "scaler": {
                    "init_scale": self.scaler_init_scale,
                    "growth_interval": self.scaler_growth_interval,
                },
            },
            "parallel": self._parallel(where),
            "communication": self._compression(),
            "checkpoint": self._checkpoint(where),
            "record": self._record(),
        }

    def _parallel(self, where: Places) -> dict[str, Any]:
        strategy = "deepspeed" if self._wants_deepspeed else _STRATEGIES[self.backend]
        horovod = self.compression if strategy == "horovod" else "none"
        said: dict[str, Any] = {
            "strategy": strategy,
            "ddp": {"find_unused_parameters": self.find_unused_parameters},
            "deepspeed": {"zero_stage": self.zero_stage, "config": self._deepspeed_contents()},
            "horovod": {"compression": horovod},
        }
        if self.sharding_strategy is not None:
            said |= _as_fsdp(self._sharding, where)
        return said

    def _deepspeed_contents(self) -> str | dict[str, Any] | None:
        """Return the file or contents; DeepSpeed's own class keeps its contents in an attribute."""
        given = getattr(self.deepspeed_config, "_param_dict", self.deepspeed_config)
        if isinstance(given, Mapping):
            return dict(given)
        return None if given is None else str(given)

    def _compression(self) -> dict[str, Any]:
        if self.backend == "horovod":
            return {}
        if isinstance(self.compression, GradientCompression):
            return self.compression.settings
        return {"compression": self.compression}

    def _checkpoint(self, where: Places) -> dict[str, Any]:
        """Return the section; resumable checkpoints go to checkpoint_dir only if asked for."""
        every = self.checkpoint_every_n_steps or _in_steps(
            "checkpoint_frequency", self.checkpoint_frequency, "checkpoint_every_n_steps", where
        )
        resume = self.resume_from_checkpoint
        return {
            "every_steps": every or "auto",
            "directory": self.checkpoint_dir if every or resume else None,
            "resume_from": self.checkpoint_dir if resume is True else resume or None,
        }

    def _record(self) -> dict[str, Any]:
        sinks = {"tensorboard": self.tensorboard, "mlflow": self.wants_mlflow}
        named = self.mlflow_experiment
        return {
            "logging_steps": self.log_every_n_steps,
            "sinks": [name for name, is_wanted in sinks.items() if is_wanted],
            "mlflow": {} if named is None else {"experiment": named},
        }


def _in_steps(name: str, epochs: int | None, instead: str, where: Places) -> int:
    """Convert a number of epochs to steps."""
    if not epochs:
        return 0
    if where.steps_per_epoch is None:
        rule, remedy = "the length of an epoch of this data is not known", f"set {instead}"
        raise ConfigError([Problem(name, rule, remedy, epochs)])
    return epochs * where.steps_per_epoch


def _as_fsdp(name: str, where: Places) -> dict[str, Any]:
    """Convert torch's sharding strategies to Drivetrain's keys."""
    if name == "NO_SHARD":
        return {"strategy": "ddp"}
    keeps = name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    said: dict[str, Any] = {
        "strategy": "fsdp",
        "fsdp": {"reshard_after_forward": False if keeps else "auto"},
    }
    if "HYBRID" in name:
        per_node = where.ranks_per_node or where.num_ranks
        said |= {"dp_shard": per_node, "dp_replicate": where.num_ranks // per_node}
    return said


def with_settings(config: DistributedConfig, settings: Mapping[str, Any]) -> DistributedConfig:
    """Return the config with the settings replaced; ConfigError for unknown names."""
    known = [field.name for field in fields(DistributedConfig)]
    problems = []
    for name in sorted(settings.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        problems.append(Problem(name, "unknown setting", remedy, settings[name]))
    if problems:
        raise ConfigError(problems)
    return replace(config, **settings)


def from_search(config: Mapping[str, Any]) -> DistributedConfig:
    """Take the settings from a search's parameters; the others belong to the model.

    A name that is almost a setting's is refused, because it is probably a typo.
    """
    known = {field.name for field in fields(DistributedConfig)}
    said = {_SYNONYMS.get(name, name): value for name, value in config.items()}
    almost = [
        n for n in said.keys() - known if difflib.get_close_matches(n, known, n=1, cutoff=0.8)
    ]
    return with_settings(DistributedConfig(), {n: said[n] for n in said if n in {*known, *almost}})


def _choice(name: str, value: str, options: tuple[str, ...]) -> Problem:
    return Problem(name, "not available in this release", f"use {' or '.join(options)}", value)
