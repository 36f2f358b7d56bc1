"""The section `data`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drivetrain.core.section import Section


class Data(Section):
    """How samples reach the model. None of it changes which samples make up a step."""

    shuffle: bool = True
    """Draw a new order each epoch from the seed; a DataLoader passed to fit() decides itself."""
    num_workers: int = Field(default=0, ge=0)
    """Loader processes per rank."""
    prefetch_factor: int = Field(default=2, gt=0)
    """Micro-batches each loader process keeps ready."""
    pin_memory: bool | Literal["auto"] = "auto"
    """Page-locked memory for faster copies to a device; auto: on an accelerator."""
    iterable_sharding: Literal["same_stream", "own_shard"] = "same_stream"
    """same_stream: every rank reads the stream and keeps its part: same numbers at any world size.
    own_shard: a rank reads only its own shard: less reading, numbers depend on the world size."""
