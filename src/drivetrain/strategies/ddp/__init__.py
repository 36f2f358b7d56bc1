"""ddp: a full copy of the model per rank; gradients are averaged while backward runs."""

from __future__ import annotations

from pydantic import Field

from drivetrain.core.section import Section
from drivetrain.core.traits import NamedLayout, Traits


class DDP(Section):
    """Handed to torch's DistributedDataParallel."""

    find_unused_parameters: bool = False
    """Search for parameters that were not used in a step. Costs a graph traversal per step."""
    bucket_cap_mb: float = Field(default=25.0, gt=0)
    """Bucket size in MiB: gradients are reduced in buckets, overlapped with backward."""
    gradient_as_bucket_view: bool = True
    """Keep gradients inside the buckets, which saves one copy of them."""
    static_graph: bool = False
    """Promise torch that every step uses the same parameters."""


_THIS = {"parallel.strategy": "ddp"}

TRAITS = Traits(
    name="ddp",
    summary="a full copy per rank",
    section=DDP,
    strategy="drivetrain.strategies.ddp.strategy:make",
    cost="drivetrain.strategies.ddp.cost:COST",
    combines_with=frozenset({"tp", "pp", "bitwise", "compression", "live"}),
    keeps_copies_equal=True,
    can_be_rehearsed=True,
    is_proposed=True,
    backends=("pytorch-ddp", "ddp", "torch", "gloo", "nccl"),
    layouts={
        "ddp": NamedLayout(("dp_replicate",), _THIS),
        "bitwise": NamedLayout(("dp_replicate",), {**_THIS, "reproducibility": "bitwise"}),
    },
)
