"""Muon on whole matrices, and the optimizers that the config names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Muon
from drivetrain.config.load import load_config
from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.gpt_task import GPT, Sentences, gpt_task
from tests.ranks.muon import Matrices, distance, weights_after


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_in_bfloat16_it_is_torchs_to_the_last_bit(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Matrices()
    theirs = weights_after(3, copy.deepcopy(model), torch.optim.Muon, **settings)
    ours = weights_after(3, copy.deepcopy(model), Muon, torch.bfloat16, **settings)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert distance(weights_after(3, model, Muon, **settings), theirs) > 1e-4, "fp32 by default"


def test_the_config_names_the_optimizer() -> None:
    model = GPT()
    sgd = from_config(model, Optimization(optimizer="sgd", momentum=0.8, learning_rate=0.1))
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["lr"]) == (0.8, 0.1)
    made = from_config(model, Optimization(optimizer="muon", weight_decay=0.1, muon_dtype="bf16"))
    assert isinstance(made, list)
    muon, adamw = made
    assert isinstance(muon, Muon)
    assert muon.dtype is torch.bfloat16
    assert (muon.defaults["momentum"], muon.defaults["weight_decay"]) == (0.95, 0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon = {names[p] for p in muon.param_groups[0]["params"]}
    assert by_muon == {n for n, p in model.named_parameters() if "blocks." in n and p.dim() == 2}
    rest = [names[p] for group in adamw.param_groups for p in group["params"]]
    assert set(rest) == set(names.values()) - by_muon
    assert {"tokens.weight", "head.weight", "blocks.0.norm1.weight"} <= set(rest)


def test_a_model_without_blocks_has_nothing_for_muon() -> None:
    with pytest.raises(ConfigError, match="no matrices in repeated blocks"):
        from_config(nn.Linear(3, 3), Optimization(optimizer="muon"))


def test_an_optimizer_of_the_tasks_own_and_the_configs_are_refused_together(tmp_path: Any) -> None:
    task = Task(GPT, gpt_task().loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    config = {
        "max_steps": 1,
        "global_batch_size": 4,
        "output_dir": str(tmp_path),
    }
    words = ["optimization.optimizer=muon", "optimization.momentum=0.9"]
    with pytest.raises(ConfigError, match="its own optimizer") as error:
        Trainer(task, load_config(argv=words, defaults=config)).fit(Sentences(8))
    assert "optimization.momentum" in str(error.value)
