"""The section `evaluation`."""

from __future__ import annotations

from pydantic import Field

from drivetrain.core.section import Section


class Evaluation(Section):
    """When and how the validation data is gone through. Every sample counts exactly once."""

    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate each so many steps; null: at the end of each epoch, and of the run."""
    batch_size: int | None = Field(default=None, gt=0)
    """Samples per forward; null: micro_batch_size if that is stated, else at most 32."""
    max_samples: int | None = Field(default=None, gt=0)
    """Of each set of validation data only the first so many; null: all of them."""
