"""local_sgd: every rank trains alone for some steps, then the ranks average their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drivetrain.core.errors import Problem
from drivetrain.core.section import Section
from drivetrain.core.traits import Rule, Traits

if TYPE_CHECKING:
    from drivetrain.config.schema import RunConfig


class LocalSGD(Section):
    """Ranks train alone for some steps, then synchronize the weights: local SGD and DiLoCo."""

    inner_steps: int = Field(default=16, gt=0)
    """Steps that each rank takes alone between two exchanges."""
    outer: Literal["average", "diloco"] = "average"
    """average: the mean of the ranks' weights. diloco: a Nesterov step along their mean change."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the Nesterov step (diloco)."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the Nesterov step (diloco)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of initial steps that exchange gradients, as ddp does."""
    outer_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which weight changes are sent; bf16 halves the traffic once more."""


def _precision(config: RunConfig) -> Iterator[Problem]:
    if config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            "ranks that train alone would skip different steps",
            "use bf16 or fp32 with parallel.strategy=local_sgd",
            "fp16",
        )


TRAITS = Traits(
    name="local_sgd",
    summary="a full copy per rank that trains alone between exchanges",
    section=LocalSGD,
    strategy="drivetrain.strategies.local_sgd.strategy:make",
    cost="drivetrain.strategies.local_sgd.cost:COST",
    rules=(Rule(("precision.dtype",), _precision),),
    changes_training=True,
    helps_with=frozenset({"bandwidth"}),
)
