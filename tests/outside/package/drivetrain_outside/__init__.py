"""flat: a strategy of another package. What is said about it, without torch."""

from __future__ import annotations

from typing import Literal

from drivetrain.core.section import Section
from drivetrain.core.traits import NamedLayout, Traits


class Flat(Section):
    """The keys `parallel.flat.…`."""

    wire_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients travel in."""


TRAITS = Traits(
    name="flat",
    summary="a full copy per rank, gradients summed in one piece",
    section=Flat,
    strategy="drivetrain_outside.strategy:make",
    cost="drivetrain_outside.cost:COST",
    keeps_copies_equal=True,
    layouts={"flat": NamedLayout(("dp_replicate",), {"parallel.strategy": "flat"})},
)
