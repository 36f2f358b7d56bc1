"""Keep DTensors and plain tensors in separate optimizer groups during a step.

With tp, some of a model's weights are DTensors and others are plain tensors. torch's foreach and
fused implementations (the default on accelerators) refuse a list with both. Each weight is updated
independently, so the grouping does not change the result.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Group = dict[str, Any]
IMPLEMENTATION = ("foreach", "fused")
"""Keys that select a group's implementation. Checkpoints store the values of their device."""
_KEPT_APART: WeakSet[torch.optim.Optimizer] = WeakSet()


def keep_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of a torch optimizer see groups with one kind of tensor each.

    This includes the step that torch makes to create state before a checkpoint is loaded. Other
    optimizers are left alone: they handle their groups in their own way and may keep counts there.
    """
    if optimizer in _KEPT_APART:  # the user's, from an earlier run
        return
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    if any("foreach" in group and len(_by_kind(group)) > 1 for group in optimizer.param_groups):
        apart = _Apart()
        optimizer.register_step_pre_hook(apart.before)
        optimizer.register_step_post_hook(apart.after)
        _KEPT_APART.add(optimizer)


class _Apart:
    """Splits the groups during a step only: schedules and checkpoints use the original groups."""

    def __init__(self) -> None:
        self._groups: list[Group] | None = None
        """The original groups, during a step or after one that failed."""

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._groups = self._groups or optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": parameters}
            for group in self._groups
            for parameters in _by_kind(group)
        ]

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None


def _by_kind(group: Group) -> list[list[torch.Tensor]]:
    """Split a group's tensors into plain ones and those of each mesh."""
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(mesh, []).append(parameter)
    return list(kinds.values())
