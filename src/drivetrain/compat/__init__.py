"""Drop-in trainers: thin presets over Trainer, under names known from other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.compat.tuner import DistributedTuner

__all__ = ["DistributedTuner"]


def __getattr__(name: str) -> Any:
    if name != "DistributedTuner":
        raise AttributeError(f"module 'drivetrain.compat' has no attribute {name!r}")
    from drivetrain.compat.tuner import DistributedTuner

    return DistributedTuner
