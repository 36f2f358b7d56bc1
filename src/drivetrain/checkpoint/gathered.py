"""The training state of an engine that keeps it internally and exports and imports it by name.

Loading a checkpoint fills temporary tensors, which are passed to the engine once all are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.checkpoint.state import TrainingState, Values, plain
from drivetrain.parallel.model import EngineStep

_MODEL, _OPTIMIZER = "model.", "optimizer."


@dataclass(kw_only=True)
class GatheredState(TrainingState):
    """`TrainingState` of a run whose optimizer works on unnamed shards."""

    keeper: EngineStep
    _targets: dict[str, torch.Tensor] = field(default_factory=dict)

    def load_targets(self) -> dict[str, torch.Tensor]:
        """Return temporary tensors, which `restore` passes to the engine."""
        tensors, _ = self._split(self.keeper.optimizer_state(make=True))
        self._targets = {**self.model_tensors(), **tensors}
        return dict(self._targets)

    def restore(self, values: Values, own: Mapping[str, Any]) -> None:
        """Restore everything, tensors included."""
        optimizer = values.get("optimizer", {"values": {}})
        plain_state = optimizer["values"]
        rest = {"optimizer": {**optimizer, "values": {}}} if "optimizer" in values else {}
        super().restore({**values, **rest}, own)
        self.keeper.put_back(
            _below(_MODEL, self._targets), _below(_OPTIMIZER, {**self._targets, **plain_state})
        )
        self._targets = {}

    def forget(self, names: list[str]) -> None:
        """Leave state that the checkpoint does not have as it was created: zeros."""
        for name in names:
            del self._targets[name]

    def _model_state(self) -> dict[str, torch.Tensor]:
        return self.keeper.model_state()

    def _optimizer_state(self) -> tuple[dict[str, torch.Tensor], Values]:
        return self._split(self.keeper.optimizer_state())

    @staticmethod
    def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Values]:
        tensors, values = {}, {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[_OPTIMIZER + name] = value
            else:
                values[_OPTIMIZER + name] = plain(value, name)
        return tensors, values


def _below(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}
