"""How far two layouts may part by rounding alone, by number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.verify.parity.trace import Stage


@dataclass(frozen=True)
class Tolerance:
    """All relative."""

    loss: float
    gradient_norm: float
    output: float
    """Of one module, against its norm."""
    value: float
    """Of one parameter's gradient or move, or of a micro-batch's loss."""
    reason: str
    judges_traces: bool = True
    """Whether a module that parts is a failure, though losses and norms agree."""

    def of(self, stage: Stage) -> float:
        """What a stage's values may part by."""
        if stage is Stage.FORWARD:
            return self.output
        return self.value if stage in _COMPUTED else EXACT


EXACT = 1e-9
"""Initial weights, data and settings are computed alike everywhere: they must be the same."""
_COMPUTED = frozenset({Stage.LOSS, Stage.BACKWARD, Stage.CLIPPING, Stage.UPDATE})

_ROUNDS = "fsdp rounds weights before it gathers them"
# In fp32, traces of healthy layouts part by 2e-6; but an attention's key bias, whose gradient is
# rounding alone, wanders under Adam, and that module's output with it (1e-4 after ten steps).
TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-3, 1e-3, 1e-3, "sums are added in another order"),
    "bf16": Tolerance(2e-2, 1e-1, 1e-1, 1e-1, f"bf16 keeps 8 bits, and {_ROUNDS}", False),
    "fp16": Tolerance(5e-3, 5e-2, 5e-2, 5e-2, f"fp16 keeps 11 bits, and {_ROUNDS}", False),
}
