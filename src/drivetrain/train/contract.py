"""A run's contract: the terms that a resume must match, and that all ranks must share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.checkpointer import versions
from drivetrain.checkpoint.contract import Contract, Terms, apart, shown
from drivetrain.config.schema import Precision, RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.traits import all_traits
from drivetrain.data.fingerprint import content
from drivetrain.data.sampled_feed import SampledFeed
from drivetrain.data.sources import Source
from drivetrain.parallel.world import World
from drivetrain.record.session import ACCEPT_CHANGE
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.setup.code import files_of_script, modules_of
from drivetrain.train.several.optimizers import kind_of
from drivetrain.train.task import OptimizerFactory
from drivetrain.train.weights.recording import sample

_HOW_GONE_THROUGH = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of an optimizer's groups that change results by rounding at most."""


_NO_TERMS = {"adamw_implementation", "optimizer"}
"""Keys that are not compared: the optimizer's class is a separate term, whoever built it."""

_OF_A_HOST = {"python", "code"}
"""Terms that may differ between ranks: one of them may import more than another."""

_MOST_TOLD = 3


def contract_of(config: RunConfig, source: Source, made: Terms, world: World) -> Contract:
    """Return all terms of a run and the changes the user accepts. Reads a few samples."""
    terms = {
        **_of_config(config),
        "data.shuffle": None if source.length is None else source.shuffle,
        "data.length": source.length,
        "data.sampler": _sampler_term(config, source),
        "data.content": content(source),
        **made,
        "layout": str(world.layout),
        "code": files_of_script(),
        **versions(),
    }
    return Contract(json.loads(json.dumps(terms)), accepted_changes())


def accepted_changes() -> frozenset[str]:
    """Return the terms whose changes since the checkpoint the user accepts."""
    return frozenset(filter(None, os.environ.get(ACCEPT_CHANGE, "").split(",")))


def _sampler_term(config: RunConfig, source: Source) -> str | None:
    """Return a digest of the first epoch's ids, which stands for the following epochs too."""
    if source.sampler is None:
        return None
    name = type(source.sampler.sampler).__name__
    return f"{name} ({source.sampler.draw(config.seed, 0).digest:016x})"


def model_terms(model: nn.Module) -> dict[str, Any]:
    """Return the terms of the model as the user's function built it, not yet distributed."""
    state = _tensors(model)
    lines = [f"{name} {what}" for name, what in _described(model).items()]
    digest = hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=4).hexdigest()
    numbers = sum(tensor.numel() for tensor in state.values())
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in state.values()}))
    return {
        "model": f"{len(state)} tensors, {numbers:,} numbers in {dtypes} ({digest})",
        "model.modules": modules_of(model),
    }


def agree_on_model(model: nn.Module, world: World) -> list[str]:
    """Let every rank start from the same model; return notes for the user. Collective.

    Tensors that differ from rank 0's in name, shape or dtype are a ConfigError: torch would only
    report that the number of parameters differs. Different values (weights that only rank 0 loaded)
    are replaced by rank 0's, as ddp does anyway: otherwise shards would come from different models.
    """
    agree_on_tensors(model, world)
    samples = {name: sample(tensor) for name, tensor in _tensors(model).items()}
    shared: dict[str, str] = json.loads(world.agree(json.dumps(samples)))
    different = [name for name, sample in samples.items() if sample != shared[name]]
    rank = world.first_with(bool(different))
    if rank is None:
        return []
    name = world.agree(different[0] if different else "", speaker=rank)
    world.share_weights(model)
    return [
        f"model: {name} on rank {rank} differs from rank 0; all ranks start from rank 0's values"
    ]


def agree_on_sampler(feed: SampledFeed, world: World) -> None:
    """ConfigError on every rank if one drew other samples than rank 0. Collective."""
    digest = str(feed.first.digest)
    rank = world.first_with(world.agree(digest) != digest)
    if rank is not None:
        raise feed.differs(0, 0)


def agree_on_tensors(model: nn.Module, world: World) -> None:
    """ConfigError if the models' tensors differ in name, shape or dtype. Collective."""
    own = _described(model)
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=16).hexdigest()
    rank = world.first_with(world.agree(digest) != digest)
    if rank is None:
        return
    first: dict[str, str] = json.loads(world.agree(json.dumps(own)))
    told = [
        [name, own.get(name, "missing"), first.get(name, "missing")]
        for name in dict.fromkeys((*first, *own))
        if own.get(name) != first.get(name)
    ] or [["model", "the same tensors in a different order", "in the expected order"]]
    found = json.loads(world.agree(json.dumps(told), speaker=rank))
    remedy = "build the same model on every rank: nothing in it may depend on the rank"
    problems = [
        Problem(name, f"on rank {rank}, but {_readable(theirs)} on rank 0", remedy, _readable(here))
        for name, here, theirs in found[:_MOST_TOLD]
    ]
    if len(found) > _MOST_TOLD:
        rule = f"{len(found) - _MOST_TOLD} more tensors differ"
        problems.append(Problem("model", rule, remedy, has_value=False))
    raise ConfigError(problems)


def _readable(what: str) -> str:
    return what.replace(" True", ", trained").replace(" False", "").replace("torch.", "")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def _described(model: nn.Module) -> dict[str, str]:
    """Return each tensor's shape, dtype and whether it is trained."""
    parameters = dict(model.named_parameters())
    return {
        name: f"{tuple(tensor.shape)} {tensor.dtype} "
        f"{name in parameters and parameters[name].requires_grad}"
        for name, tensor in _tensors(model).items()
    }


def optimizer_terms(
    optimizer: torch.optim.Optimizer, factory: OptimizerFactory, unread: Collection[str]
) -> dict[str, Any]:
    """Return the optimizer's class, and its settings if the user built it.

    The config's keys that it did not read are not compared.
    """
    groups = optimizer.param_groups
    terms: dict[str, Any] = {"optimizer.class": kind_of(optimizer)}
    if factory is not from_config:  # the settings and groups of from_config are in the config
        terms["optimizer.groups"] = len(groups)
        keys = sorted({k for group in groups for k, v in group.items() if _is_setting(k, v)})
        for key in keys:
            values = [group.get(key) for group in groups]
            terms[f"optimizer.{key}"] = values[0] if len(values) == 1 else values
    terms |= {f"optimization.{key}": None for key in unread if key not in _NO_TERMS}
    return terms


def agree_on(contract: Contract, world: World) -> None:
    """ConfigError on every rank if the terms of one differ from rank 0's. A collective call."""
    terms = contract.terms
    shared: dict[str, Any] = json.loads(world.agree(json.dumps(terms)))
    different = [key for key in terms if key not in _OF_A_HOST and terms[key] != shared[key]]
    rank = world.first_with(bool(different))
    if rank is None:
        return
    told = [[key, *map(shown, apart(terms[key], shared[key]))] for key in different]
    found = json.loads(world.agree(json.dumps(told), speaker=rank))
    raise ConfigError(
        [
            Problem(
                key,
                f"on rank {rank}, but {first} on rank 0",
                "all ranks must train the same thing: give them the same data, config and model",
                own,
            )
            for key, own, first in found
        ]
    )


def _of_config(config: RunConfig) -> dict[str, Any]:
    said = config.optimization
    optimization = said.model_dump(mode="json", exclude=_NO_TERMS)
    if not said.weight_decay:  # the key has no effect then
        optimization["decay_norms_and_biases"] = None
    if said.optimizer == "adamw":
        optimization["momentum"] = None
    if said.optimizer != "muon":
        optimization["muon_dtype"] = None
    falls = config.optimization.needs_the_end
    parallel = config.parallel
    decide = [each.name for each in all_traits() if each.changes_training]
    return {
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        # the learning rate falls until the end of the run
        "max_steps": config.max_steps if falls else None,
        "num_train_epochs": config.num_train_epochs if falls else None,
        "reproducibility": config.reproducibility,
        "precision.dtype": config.precision.dtype,
        "precision.tf32": config.precision.tf32,
        **_float8(config.precision),
        **{f"optimization.{key}": value for key, value in optimization.items()},
        "data.iterable_sharding": config.data.iterable_sharding,
        "parallel.strategy": parallel.strategy,
        "parallel.sync_batch_norm": parallel.sync_batch_norm,
        **{
            f"parallel.{name}": parallel.options.model_dump(mode="json")
            if name == parallel.strategy
            else None
            for name in decide
        },
        "communication.compression": config.communication.compression,
    }


def _float8(said: Precision) -> dict[str, Any]:
    """Return no term if float8 is not used: runs of earlier releases have none either."""
    if said.float8 == "none":
        return {}
    return {"precision.float8": said.float8, "precision.float8_skip": list(said.float8_skip)}


def _is_setting(key: str, value: Any) -> bool:
    plain = isinstance(value, (bool, int, float, str, tuple, list))
    return plain and key not in _HOW_GONE_THROUGH
