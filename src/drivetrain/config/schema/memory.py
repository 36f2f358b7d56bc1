"""The section `memory`."""

from __future__ import annotations

from typing import Literal

from drivetrain.core.section import Section


class Memory(Section):
    """Trading time for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: recompute each repeated block's activations in backward instead of keeping them.
    selective: keep what matrix products and attention gave, recompute the rest."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: fsdp's shards of weights, gradients and optimizer state wait in the host's memory."""
