"""A run's contract, made from what was assembled; all ranks must have made the same."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import versions
from drivetrain.checkpoint.contract import Contract, Terms
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.traits import all_traits
from drivetrain.data.fingerprint import content
from drivetrain.data.sources import Source
from drivetrain.parallel.world import World
from drivetrain.record.session import ACCEPT_CHANGE
from drivetrain.train.task import OptimizerFactory, adamw

_HOW_GONE_THROUGH = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Of an optimizer's groups: what changes no number beyond rounding."""


def contract_of(config: RunConfig, source: Source, made: Terms, world: World) -> Contract:
    """Every term of a run, and what the user accepts a change of. Reads a few samples."""
    terms = {
        **_of_config(config),
        "data.shuffle": None if source.length is None else source.shuffle,
        "data.length": source.length,
        "data.content": content(source),
        **made,
        "layout": str(world.layout),
        **versions(),
    }
    accepted = frozenset(filter(None, os.environ.get(ACCEPT_CHANGE, "").split(",")))
    return Contract(json.loads(json.dumps(terms)), accepted)


def model_terms(model: nn.Module) -> dict[str, Any]:
    """The model as the user's function has made it, before it is spread."""
    parameters = dict(model.named_parameters())
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} "
        f"{name in parameters and parameters[name].requires_grad}"
        for name, tensor in state.items()
    ]
    digest = hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=4).hexdigest()
    numbers = sum(tensor.numel() for tensor in state.values())
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in state.values()}))
    return {"model": f"{len(state)} tensors, {numbers:,} numbers in {dtypes} ({digest})"}


def optimizer_terms(optimizer: torch.optim.Optimizer, factory: OptimizerFactory) -> dict[str, Any]:
    """The optimizer's kind, and its settings where they are the user's own."""
    groups = optimizer.param_groups
    terms: dict[str, Any] = {
        "optimizer.class": type(optimizer).__name__,
        "optimizer.groups": len(groups),
    }
    if factory is not adamw:  # that one's settings are the config's
        keys = sorted({k for group in groups for k, v in group.items() if _is_setting(k, v)})
        for key in keys:
            values = [group.get(key) for group in groups]
            terms[f"optimizer.{key}"] = values[0] if len(values) == 1 else values
    return terms


def agree_on(contract: Contract, world: World) -> None:
    """ConfigError on every rank when one's terms are not rank 0's. A collective call."""
    terms = contract.terms
    shared: dict[str, Any] = json.loads(world.agree(json.dumps(terms)))
    different = [key for key in terms if key != "python" and terms[key] != shared[key]]
    rank = world.first_with(bool(different))
    if rank is None:
        return
    told = [[key, terms[key], shared[key]] for key in different]
    found = json.loads(world.agree(json.dumps(told), speaker=rank))
    raise ConfigError(
        [
            Problem(
                key,
                f"on rank {rank}, and {first} on rank 0",
                "all ranks must train the same thing: give them the same data, config and model",
                own,
            )
            for key, own, first in found
        ]
    )


def _of_config(config: RunConfig) -> dict[str, Any]:
    optimization = config.optimization.model_dump(mode="json", exclude={"adamw_implementation"})
    falls = config.optimization.lr_scheduler_type != "constant"
    parallel = config.parallel
    decide = [each.name for each in all_traits() if each.changes_training]
    return {
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        # the learning rate falls to the end of the run, wherever that is
        "max_steps": config.max_steps if falls else None,
        "num_train_epochs": config.num_train_epochs if falls else None,
        "reproducibility": config.reproducibility,
        "precision.dtype": config.precision.dtype,
        "precision.tf32": config.precision.tf32,
        **{f"optimization.{key}": value for key, value in optimization.items()},
        "data.iterable_sharding": config.data.iterable_sharding,
        "parallel.strategy": parallel.strategy,
        **{
            f"parallel.{name}": parallel.options.model_dump(mode="json")
            if name == parallel.strategy
            else None
            for name in decide
        },
        "communication.compression": config.communication.compression,
    }


def _is_setting(key: str, value: Any) -> bool:
    plain = isinstance(value, (bool, int, float, str, tuple, list))
    return plain and key not in _HOW_GONE_THROUGH
