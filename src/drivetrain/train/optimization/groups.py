"""Tensors of one kind per call: torch's optimizers update many at once, and cannot mix them.

Under tp some of a model's weights are DTensors, others plain; foreach and fused implementations
(torch's choice on accelerators) refuse a list with both. An update looks at one weight at a time,
so who is in a list with whom changes no number.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Group = dict[str, Any]
IMPLEMENTATION = ("foreach", "fused")
"""How a group is gone through. A checkpoint has it too, from the device it was made on."""
_KEPT_APART: WeakSet[torch.optim.Optimizer] = WeakSet()


def keep_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of one of torch's own optimizers see groups of one kind each.

    Any step: torch makes one itself to bring state into being before a checkpoint is loaded. Other
    optimizers go through their groups as they like, may keep counts in them, and are left alone.
    """
    if optimizer in _KEPT_APART:  # a user's own, trained with before
        return
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    if any("foreach" in group and len(_by_kind(group)) > 1 for group in optimizer.param_groups):
        apart = _Apart()
        optimizer.register_step_pre_hook(apart.before)
        optimizer.register_step_post_hook(apart.after)
        _KEPT_APART.add(optimizer)


class _Apart:
    """Only for the time of a step: schedules and checkpoints go by the groups as they were made."""

    def __init__(self) -> None:
        self._groups: list[Group] | None = None
        """As they were made, while a step is under way, or after one that failed."""

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
    """Plain tensors, and those of each mesh."""
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(mesh, []).append(parameter)
    return list(kinds.values())
