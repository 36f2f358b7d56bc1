"""A decision matrix that is often passed around, row by row, as the planner answers it.

docs/how-planning-works.md has the table, and why the planner differs where it does.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.cluster.file import load_cluster
from drivetrain.plan.plan import Plan, kind_of, make_plan
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.plan.profile.sources import from_architecture
from drivetrain.plan.profile.subject import Subject
from drivetrain.plan.search import Question

pytestmark = pytest.mark.slow
named_models = pytest.mark.skipif(
    find_spec("transformers") is None, reason="pip install 'drivetrain[plan]'"
)


def plan_for(subject: Subject, cluster: str, batch: int, **asked: Any) -> Plan:
    return make_plan(Profiler(subject), load_cluster(cluster), Question(batch, **asked))


def best_kind(plan: Plan) -> str:
    assert plan.best is not None
    return kind_of(plan.best)


def kinds_that_fit(plan: Plan) -> set[str]:
    return {kind_of(one) for one in plan.ranked}


def test_resnet_50_on_8_devices_is_copied() -> None:
    """The matrix: DDP, the model fits and it is simple."""
    resnet = replace(
        from_architecture("resnet-50"),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    plan = plan_for(resnet, "a100-40:8", 512, strategies=("ddp", "fsdp"))
    assert best_kind(plan) == "ddp"
    assert plan.why_not["fsdp"] == "fits, and takes as long per step"


@named_models
def test_gpt2_xl_on_4_devices_is_sharded() -> None:
    """The matrix: FSDP with full sharding, too large for a copy on each."""
    plan = plan_for(from_architecture("gpt2-xl"), "a10:4", 32)
    assert best_kind(plan) == "fsdp"
    assert "ddp" not in kinds_that_fit(plan)
    assert "needs" in plan.why_not["zero-1"]


@pytest.mark.long
@named_models
def test_llama_7b_on_8_devices_is_sharded_and_needs_no_offload() -> None:
    """The matrix: ZeRO-3 with offload. The same sharding, but 8 × 40 GB hold it without."""
    plan = plan_for(from_architecture("llama-2-7b"), "a100-40:8", 32)
    assert best_kind(plan) == "fsdp"
    assert "ddp" not in kinds_that_fit(plan)
    assert all(one.candidate.offload == "none" for one in plan.ranked)


class LowRank(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def low_rank(subject: Subject) -> Subject:
    def model() -> nn.Module:
        made: Any = subject.model()
        made.requires_grad_(requires_grad=False)
        for layer in made.model.layers:
            attention = layer.self_attn
            attention.q_proj = LowRank(attention.q_proj)
            attention.v_proj = LowRank(attention.v_proj)
        whole: nn.Module = made
        return whole

    return replace(subject, name=f"{subject.name} with LoRA", model=model)


@named_models
def test_low_rank_tuning_is_sharded_for_its_frozen_weights() -> None:
    """The matrix: FSDP with LoRA. 25 GiB of frozen weights do not fit on one device of 24 GB."""
    plan = plan_for(low_rank(from_architecture("llama-2-7b", 2048)), "a10:8", 32)
    assert best_kind(plan) == "fsdp"
    assert "ddp" not in kinds_that_fit(plan)
    assert plan.best is not None
    assert plan.best.memory.optimizer < 0.01 * plan.best.memory.parameters


@pytest.mark.long
@named_models
def test_llama_70b_on_64_devices_is_sharded_before_it_is_divided() -> None:
    """The matrix: 3D parallelism. It fits, but waits for its pipeline; with less memory it wins."""
    plan = plan_for(
        from_architecture("llama-3-70b", 4096), "a100-80:64", 256, strategies=("ddp", "fsdp")
    )
    assert best_kind(plan) == "fsdp"
    assert "fits, but takes" in plan.why_not["fsdp + tp + pp"]
    assert any("memory" in change and "pp" in change for change in plan.changes)
