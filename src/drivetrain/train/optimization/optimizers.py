"""Build the optimizer that the config names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import repeated_blocks
from drivetrain.parallel.several_models import ModelsByName
from drivetrain.train.optimization.muon import Muon
from drivetrain.train.several.optimizers import OptimizersByName, as_one

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]

IMPLEMENTATIONS: dict[str, tuple[bool | None, bool | None]] = {
    "auto": (None, None),
    "for_loop": (False, False),
    "foreach": (True, False),
    "fused": (False, True),
}
"""torch's `foreach` and `fused`."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def from_config(model: nn.Module, optimization: Optimization) -> Optimizers:
    """Return AdamW, SGD, or Muon for the matrices of the blocks with AdamW for the rest.

    Several models get one optimizer each.
    """
    if isinstance(model, ModelsByName):
        if optimization.optimizer == "muon":
            rule = "also needs AdamW, but each of several models has only one optimizer"
            remedy = "use adamw or sgd, or pass optimizers by name"
            raise ConfigError([Problem("optimization.optimizer", rule, remedy, "muon")])
        return OptimizersByName(
            {name: as_one(from_config(each, optimization)) for name, each in model.items()}
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimization.optimizer == "adamw":
        return _adamw(trained, optimization)
    if optimization.optimizer == "sgd":
        return torch.optim.SGD(
            _groups(trained, optimization),
            lr=optimization.learning_rate,
            momentum=optimization.momentum or 0.0,
            weight_decay=optimization.weight_decay,
        )
    matrices = _hidden_matrices(model)
    if not matrices:
        rule = "the model has no matrices in repeated blocks (the children of a ModuleList)"
        remedy = "give Task your own optimizers: drivetrain.Muon and torch.optim.AdamW"
        raise ConfigError([Problem("optimization.optimizer", rule, remedy, "muon")])
    muon = Muon(
        matrices,
        lr=optimization.learning_rate,
        momentum=0.95 if optimization.momentum is None else optimization.momentum,
        weight_decay=optimization.weight_decay,
        # scales updates to AdamW's size, so that one learning rate fits both
        adjust_lr_fn="match_rms_adamw",
    )
    muon.dtype = _DTYPES[optimization.muon_dtype]
    theirs = set(matrices)
    rest = [parameter for parameter in trained if parameter not in theirs]
    return [muon, _adamw(rest, optimization)] if rest else muon


def _adamw(trained: Sequence[nn.Parameter], optimization: Optimization) -> torch.optim.Optimizer:
    foreach, fused = IMPLEMENTATIONS[optimization.adamw_implementation]
    return torch.optim.AdamW(
        _groups(trained, optimization),
        lr=optimization.learning_rate,
        weight_decay=optimization.weight_decay,
        foreach=foreach,
        fused=fused,
    )


def _groups(trained: Sequence[nn.Parameter], optimization: Optimization) -> list[dict[str, Any]]:
    if not decays_matrices_only(optimization):
        return [{"params": list(trained)}]
    return [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def decays_matrices_only(optimization: Optimization) -> bool:
    """True if the config's optimizer keeps norms and biases in a group without weight decay."""
    return optimization.weight_decay > 0 and not optimization.decay_norms_and_biases


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the blocks' 2-D weights without embeddings; the same ones in a pipeline's stages."""
    modules = [module for block in repeated_blocks(model) for module in block.modules()]
    found = {
        parameter: None
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.dim() == 2
    }
    return list(found)
