"""parameter_server: ranks push gradients to the rank that owns a weight, and pull weights back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drivetrain.core.errors import Problem
from drivetrain.core.section import Section
from drivetrain.core.traits import NamedLayout, Rule, Traits

if TYPE_CHECKING:
    from drivetrain.config.schema import RunConfig


class ParameterServer(Section):
    """Every rank is a worker and also the server of a shard of the weights and optimizer state."""

    mode: Literal["synchronous", "stale_synchronous", "asynchronous"] = "synchronous"
    """synchronous: the same results as ddp. stale_synchronous: each gradient is applied as it
    arrives, and no rank is more than `staleness_bound` steps ahead. asynchronous: no bound."""
    staleness_bound: int = Field(default=4, ge=0)
    """Steps that a rank may be ahead of the slowest one (stale_synchronous)."""
    pull_every: int = Field(default=1, gt=0)
    """Steps between two fetches of the weights; above 1, gradients are of older weights."""
    learning_rate: Literal["per_rank", "as_given"] = "per_rank"
    """Learning rate for one rank's gradient where each is applied separately. per_rank: the run's
    divided by the number of ranks, so that a step of all ranks moves the weights as far as with
    ddp. as_given: undivided."""
    sparse_rows: bool = False
    """Send only the matrix rows that have a gradient or have changed."""


_KEY = "parallel.parameter_server"


def _run(config: RunConfig) -> Iterator[Problem]:
    if config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            "a server that receives one rank's gradients cannot skip a step for all ranks",
            "use bf16 or fp32 with parallel.strategy=parameter_server",
            "fp16",
        )
    if config.checkpoint.save == "full":
        yield Problem(
            "checkpoint.save",
            "rank 0 does not have the other servers' optimizer state",
            "use checkpoint.save=sharded",
            "full",
        )


def _pulls(config: RunConfig) -> Iterator[Problem]:
    settings = config.parallel.details(ParameterServer)
    if settings.mode == "synchronous" and settings.pull_every > 1:
        yield Problem(
            f"{_KEY}.pull_every",
            "synchronous ranks compute each gradient with the weights of the previous step",
            f"use {_KEY}.mode=stale_synchronous or asynchronous",
            settings.pull_every,
        )


TRAITS = Traits(
    name="parameter_server",
    summary="one server per rank for a part of the weights; ranks push gradients to them",
    section=ParameterServer,
    strategy="drivetrain.strategies.parameter_server.strategy:make",
    cost="drivetrain.strategies.parameter_server.cost:COST",
    rules=(
        Rule(("precision.dtype", "checkpoint.save"), _run),
        Rule((f"{_KEY}.mode", f"{_KEY}.pull_every"), _pulls),
    ),
    changes_training=True,
    layouts={
        "parameter_server": NamedLayout(
            ("dp_replicate",),
            {"parallel.strategy": "parameter_server", f"{_KEY}.mode": "synchronous"},
        )
    },
)
