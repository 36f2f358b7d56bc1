"""parameter_server: ranks push gradients to the rank that keeps a weight, and pull weights back."""

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
    """Every rank is a worker, and the server of a shard of the weights and optimizer state."""

    mode: Literal["synchronous", "stale_synchronous", "asynchronous"] = "synchronous"
    """synchronous: ddp's numbers. stale_synchronous: each gradient is applied as it comes, no rank
    is more than `staleness_bound` steps ahead. asynchronous: no bound."""
    staleness_bound: int = Field(default=4, ge=0)
    """Steps that a rank may be ahead of the slowest one (stale_synchronous)."""
    pull_every: int = Field(default=1, gt=0)
    """Fetch weights after every so many steps; above 1 gradients are of older weights."""
    learning_rate: Literal["per_rank", "as_given"] = "per_rank"
    """Of one rank's gradient where each is applied by itself. per_rank: the run's learning rate
    divided by the ranks, so that a step of all ranks moves as far as ddp's. as_given: undivided."""
    sparse_rows: bool = False
    """Send only those rows of matrices that have a gradient, or that have changed."""


_KEY = "parallel.parameter_server"


def _run(config: RunConfig) -> Iterator[Problem]:
    if config.precision.dtype == "fp16":
        yield Problem(
            "precision.dtype",
            "a server that gets one rank's gradients cannot skip a step for all of them",
            "use bf16 or fp32 with parallel.strategy=parameter_server",
            "fp16",
        )
    if config.checkpoint.save == "full":
        yield Problem(
            "checkpoint.save",
            "rank 0 has no other server's optimizer state",
            "use checkpoint.save=sharded",
            "full",
        )


def _pulls(config: RunConfig) -> Iterator[Problem]:
    settings = config.parallel.details(ParameterServer)
    if settings.mode == "synchronous" and settings.pull_every > 1:
        yield Problem(
            f"{_KEY}.pull_every",
            "synchronous ranks compute each gradient with the weights of the step before",
            f"use {_KEY}.mode=stale_synchronous or asynchronous",
            settings.pull_every,
        )


TRAITS = Traits(
    name="parameter_server",
    summary="weights on servers, one per rank, that ranks push gradients to",
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
