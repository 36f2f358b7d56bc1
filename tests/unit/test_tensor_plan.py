"""Tensor-parallel plans: where they come from, and which are refused."""

from __future__ import annotations

import pytest
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.parallel.tensor import ShardedLayer, plan_for
from tests.gpt_task import GPT


def plan_of_two_layers(model: nn.Module) -> dict[str, str]:
    assert isinstance(model, GPT)
    return {"blocks.0.qkv": "colwise", "blocks.0.out": "rowwise"}


def test_a_plan_is_the_models_or_a_functions_or_a_list() -> None:
    model = GPT(layers=1)
    cuts = {
        ShardedLayer("blocks.0.qkv", "colwise"),
        ShardedLayer("blocks.0.out", "rowwise"),
        ShardedLayer("blocks.0.mlp.0", "colwise"),
        ShardedLayer("blocks.0.mlp.2", "rowwise"),
        ShardedLayer("head", "colwise_gather"),
    }
    assert set(plan_for(model, "model", 2)) == cuts
    assert len(plan_for(model, f"{__name__}:plan_of_two_layers", 2)) == 2
    assert plan_for(model, ("head=colwise_rep",), 2) == [ShardedLayer("head", "colwise_gather")]
    assert plan_for(GPT(layers=3), ("blocks.*.qkv=colwise",), 2)[2].name == "blocks.2.qkv"
    assert plan_for(model, ("tokens=embedding",), 2) == [ShardedLayer("tokens", "embedding")]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (("blocks.*.up=colwise",), "no module has this name; the linear layers are blocks"),
        (("blocks.*.qkv=sideways",), "has an unknown style; use colwise"),
        (("blocks.*.norm1=colwise",), "LayerNorm, which cannot be sharded in this style"),
        (("blocks.*.qkv",), "is not a line of a plan; write module=colwise"),
        ("nowhere:plan", "cannot be loaded"),
        ("other", "has no tp_plan"),
    ],
)
def test_a_wrong_plan_is_refused(plan: str | tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_for(GPT(), plan, 2)


def test_sizes_that_would_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model's 4 heads; use 1, 2 or 4"):
        plan_for(GPT(), "model", 3)
    with pytest.raises(ConfigError, match=r"the 10 outputs of 0; use 1, 2, 5 or 10"):
        plan_for(nn.Sequential(nn.Linear(8, 10)), ("0=colwise",), 4)
    with pytest.raises(ConfigError, match="has no tp_plan"):
        plan_for(nn.Linear(2, 2), "model", 2)
