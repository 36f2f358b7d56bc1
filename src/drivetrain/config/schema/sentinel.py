"""The section `sentinel`."""

from __future__ import annotations

from pydantic import Field

from drivetrain.core.section import Section


class Sentinel(Section):
    """Are the copies of the model still copies?"""

    every_steps: int | None = Field(default=100, gt=0)
    """Compare the copies' weights, to the last bit, each so many steps, and stop when they differ;
    null: never. Only where there are copies: ddp, and fsdp with dp_replicate."""
