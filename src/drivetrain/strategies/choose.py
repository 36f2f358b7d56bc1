"""From a config to the strategy it asks for."""

from __future__ import annotations

from drivetrain.config.schema import RunConfig
from drivetrain.core.plugins import load
from drivetrain.strategies.strategy import Strategy


def strategy_from(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Imported now; `micro_batch_blocks` are each rank's micro-batch indices."""
    made: Strategy = load(config.parallel.traits.strategy)(config, micro_batch_blocks)
    return made
