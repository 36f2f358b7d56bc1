"""fsdp: weights, gradients and optimizer state in shards (FSDP2 `fully_shard`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from drivetrain.core.errors import Problem
from drivetrain.core.section import Section
from drivetrain.core.traits import NamedLayout, Rule, Traits

if TYPE_CHECKING:
    from drivetrain.config.schema import RunConfig


class FSDP(Section):
    """Handed to torch's FSDP2 `fully_shard`."""

    shard_modules: tuple[str, ...] = ()
    """Classes (`LlamaDecoderLayer`) and names of modules (`lm_head`) to shard separately; empty:
    the model's repeated blocks, found automatically."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Free gathered weights after forward (less memory), or keep them (less traffic); auto: free
    those of the blocks, keep those of the root, which backward needs first."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients to shards after every micro-batch (less memory), or keep them unsharded on
    each rank and reduce once per step (less traffic)."""


def _schedule(config: RunConfig) -> Iterator[Problem]:
    schedule = config.parallel.pipeline.schedule
    if config.parallel.pp > 1 and schedule in ("zero_bubble", "zbv", "dualpipev"):
        yield Problem(
            "parallel.pipeline.schedule",
            "splits backward in two, which fsdp does not support",
            "use 1f1b, interleaved_1f1b, looped_bfs or gpipe, or parallel.strategy=ddp",
            schedule,
        )


_THIS = {"parallel.strategy": "fsdp"}

TRAITS = Traits(
    name="fsdp",
    summary="sharded weights, gradients and optimizer state",
    section=FSDP,
    strategy="drivetrain.strategies.fsdp.strategy:make",
    cost="drivetrain.strategies.fsdp.cost:COST",
    fills="dp_shard",
    combines_with=frozenset({"tp", "pp", "cp", "ep", "offload"}),
    rules=(Rule(("parallel.pp", "parallel.pipeline.schedule"), _schedule),),
    keeps_copies_equal=True,
    can_be_rehearsed=True,
    rehearse_within="drivetrain.strategies.fsdp.internals:cutting_one_shard",
    is_proposed=True,
    preload=("torch.distributed.fsdp", "drivetrain.strategies.fsdp.strategy"),
    backends=("pytorch-fsdp", "fsdp"),
    known_as=("zero", "zero3", "zero-3", "hsdp"),
    layouts={
        "fsdp": NamedLayout(("dp_shard",), _THIS),
        "hsdp": NamedLayout(("dp_replicate", "dp_shard"), _THIS),
        "cp": NamedLayout(("cp",), _THIS),
        "fsdp+tp": NamedLayout(("dp_shard", "tp"), _THIS),
        "fsdp+cp": NamedLayout(("dp_shard", "cp"), _THIS),
        "fsdp+pp": NamedLayout(("pp", "dp_shard"), _THIS),
    },
    helps_with=frozenset({"memory"}),
)
