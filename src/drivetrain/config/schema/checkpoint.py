"""The section `checkpoint`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.core.section import Section


class Checkpoint(Section):
    """What is saved, when, where, and how long it is kept."""

    every_steps: int | Literal["auto"] | None = "auto"
    """Save each so many steps. auto: the interval that loses the least, from what a save costs and
    how often the run has failed (Young, Daly). null: never."""
    save: Literal["sharded", "full"] = "sharded"
    """sharded: every rank writes its part. full: rank 0 gathers and writes everything."""
    contents: Literal["everything", "weights"] = "everything"
    """everything: a run can go on from it exactly. weights: the model alone."""
    asynchronous: bool = True
    """Write beside the steps, which wait only for a copy in memory."""
    directory: str | None = None
    """A path, or any fsspec address (s3://…); null: checkpoints/ in the run's directory."""
    keep_last: int = Field(default=2, gt=0)
    """Keep the newest so many."""
    keep_every: int | None = Field(default=None, gt=0)
    """Also keep those whose step is a multiple of this."""
    keep_best: str | None = None
    """Also keep the best by this validation metric, for example loss or accuracy."""
    keep_best_mode: Literal["min", "max"] = "min"
    """Whether the lowest or the highest is best."""
    resume_from: str | None = None
    """Start from the newest checkpoint of another run: its directory or its checkpoints'."""
