"""What a rank alone has besides its random streams, and must find again when the run goes on."""

from __future__ import annotations

from drivetrain.checkpoint.state import Stateful
from drivetrain.parallel.ddp import Replicated
from drivetrain.parallel.local_sgd import Local
from drivetrain.train.engine import Engine


def own_states(engine: Engine) -> dict[str, Stateful]:
    """By name: what a compressor kept back; a rank that trains alone has its own optimizer."""
    spread = engine.spread
    if isinstance(spread, Replicated) and spread.communication.compressor is not None:
        return {"communication": spread.communication.compressor}
    if isinstance(spread, Local):
        return {"local_sgd": spread, "inner_optimizer": engine.optimizer}
    return {}
