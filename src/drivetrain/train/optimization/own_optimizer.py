"""Which of the config's optimizer keys have an effect on an optimizer that the script makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import PrivateAttr

from drivetrain.config.schema import Optimization
from drivetrain.config.script_reads import OPTIMIZER_KEYS, read_by_script
from drivetrain.train.optimization.optimizers import IMPLEMENTATIONS
from drivetrain.train.several.optimizers import kind_of, members

_SETTINGS = {"learning_rate": "lr", "weight_decay": "weight_decay", "momentum": "momentum"}
"""A key, and its name in an optimizer's parameter groups."""
_PEAKS = ("initial_lr", "max_lr")
"""What torch's schedulers add to a group whose `lr` they change."""
_WHOLE = ("__dict__", "model_dump", "model_dump_json")


class WatchedSection(Optimization):
    """The section `optimization` for a script's function, which records the keys that it reads."""

    _read: set[str] = PrivateAttr(default_factory=set)

    @classmethod
    def of(cls, section: Optimization) -> WatchedSection:
        """Return a copy of the section of which nothing has been read."""
        return cls.model_construct(**dict(section))

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; record the key, or all keys if the section is read as a whole."""
        if name in OPTIMIZER_KEYS:
            self._read.add(name)
        elif name in _WHOLE:
            self._read.update(OPTIMIZER_KEYS)
        return super().__getattribute__(name)

    @property
    def unread(self) -> frozenset[str]:
        """The optimizer's keys that were not read, here or anywhere in the script."""
        return frozenset(OPTIMIZER_KEYS) - self._read - read_by_script()


def has_value(optimizer: torch.optim.Optimizer, key: str, value: Any) -> bool:
    """Return True if the optimizer has a key's value, for example because the script passed it."""
    if key == "optimizer":
        kinds = {kind.__name__.lower() for o in members(optimizer) for kind in type(o).__mro__}
        return value in kinds
    if key == "adamw_implementation":
        flags = dict(zip(("foreach", "fused"), IMPLEMENTATIONS[value], strict=True))
        return any(all(g.get(k) is v for k, v in flags.items()) for g in optimizer.param_groups)
    found = _settings(optimizer, key)
    found |= peaks(optimizer) if key == "learning_rate" else set()
    # a rate may be a tensor, in fewer digits
    return value is not None and any(math.isclose(value, each, rel_tol=1e-6) for each in found)


def peaks(optimizer: torch.optim.Optimizer) -> set[float]:
    """Return the learning rates of all groups, and the peaks of a scheduler that changes them."""
    return _numbers(optimizer, ("lr", *_PEAKS))


def shown(optimizer: torch.optim.Optimizer, key: str) -> str:
    """Return the optimizer's class, and its setting that corresponds to the key."""
    values = " and ".join(f"{value:g}" for value in sorted(_settings(optimizer, key)))
    is_scheduled = key == "learning_rate" and bool(_numbers(optimizer, _PEAKS))
    by = ", by its scheduler" if is_scheduled else ""
    return kind_of(optimizer) + (f", {_SETTINGS[key]} = {values}{by}" if values else "")


def _settings(optimizer: torch.optim.Optimizer, key: str) -> set[float]:
    return _numbers(optimizer, (_SETTINGS.get(key, ""),))


def _numbers(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> set[float]:
    """Return the groups' settings of these names that are single numbers."""
    values = [group[name] for group in optimizer.param_groups for name in names if name in group]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.numel() == 1]
    return {float(v) for v in values if isinstance(v, (int, float))} | {float(v) for v in tensors}
