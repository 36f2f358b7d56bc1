"""A common decision matrix for distributed training, as the planner answers it.

Each row: a scenario, the devices it is read for, what the matrix recommends, and what the planner
says with its reason. docs/planning.md explains where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.cluster.file import load_cluster
from drivetrain.plan.plan import Plan, make_plan
from drivetrain.plan.profiling import Profiler
from drivetrain.plan.reasons import kind_of
from drivetrain.plan.search import Question
from drivetrain.plan.sources import from_architecture
from drivetrain.plan.subject import Subject

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Row:
    subject: Subject
    cluster: str
    batch: int
    recommended: str


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
            attention.q_proj, attention.v_proj = (
                LowRank(attention.q_proj),
                LowRank(attention.v_proj),
            )
        whole: nn.Module = made
        return whole

    return Subject(
        f"{subject.name} with LoRA",
        model,
        subject.loss,
        subject.batch,
        tokens_per_sample=subject.tokens_per_sample,
    )


def plan_of(row: Row, **changes: Any) -> Plan:
    question = Question(row.batch, strategies=("ddp", "fsdp", "deepspeed"), **changes)
    return make_plan(Profiler(row.subject), load_cluster(row.cluster), question)


def best_kind(plan: Plan) -> str:
    assert plan.best is not None
    return kind_of(plan.best)


def test_resnet_50_on_8_is_copied() -> None:
    plan = plan_of(Row(from_architecture("resnet-50"), "v100:8", 512, "DDP"))
    assert best_kind(plan) == "ddp"  # the matrix: DDP, the model fits


def test_gpt2_xl_on_4_small_devices_is_sharded() -> None:
    row = Row(from_architecture("gpt2-xl"), "a10:4", 32, "FSDP FULL_SHARD")
    plan = plan_of(row)
    assert best_kind(plan) in ("fsdp", "zero-3")  # the matrix: FSDP full shard
    assert "needs" in plan.why_not["ddp"]


def test_llama_7b_on_8_is_sharded_without_offload() -> None:
    row = Row(from_architecture("llama-2-7b"), "a100-40:8", 32, "DeepSpeed ZeRO-3")
    plan = plan_of(row)
    # the matrix: ZeRO-3 with offload. The same sharding, but 8 × 40 GB need no offload
    assert best_kind(plan) in ("fsdp", "zero-3", "zero-2")
    assert plan.best is not None
    assert plan.best.candidate.offload == "none"
    assert "ddp" in plan.why_not


def test_llama_70b_on_64() -> None:
    row = Row(from_architecture("llama-3-70b", 4096), "a100-80:64", 256, "3D parallelism")
    plan = plan_of(row)
    kind = best_kind(plan)
    assert "fsdp" in kind or "hsdp" in kind or "pp" in kind
    assert plan.num_considered > 100


def test_low_rank_tuning_is_sharded_for_the_frozen_weights() -> None:
    tuned = low_rank(from_architecture("llama-2-7b", 2048))
    plan = plan_of(Row(tuned, "a10:8", 32, "FSDP + LoRA"))
    assert best_kind(plan) in ("fsdp", "hsdp")  # 27 GB of frozen weights do not fit one by one
    whole = plan_of(Row(from_architecture("llama-2-7b", 2048), "a10:8", 32, ""))
    assert plan.best is not None
    assert whole.best is None or plan.best.memory.total < whole.best.memory.total
