"""Memory of a learner's code: what its objects hold between steps, and what a step allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_LOOKED_INTO = (type, ModuleType, FunctionType, MethodType, str, bytes, int, float)


@dataclass(frozen=True)
class Allocations:
    """What one call allocated, beyond what was allocated before."""

    peak_bytes: int
    kept_bytes: int
    """Still allocated at the end of the call."""


def allocations(function: Callable[[], Any]) -> Allocations:
    """Return what torch allocated while `function` ran, including what autograd keeps.

    gloo's threads release their tensors a moment late: call it more than once, and take the
    minimum.
    """
    live = _LiveTensors()
    with live:
        function()
    return Allocations(live.peak_bytes, live.bytes_now())


class _LiveTensors(TorchDispatchMode):
    """Tracks how many bytes of the operations' results are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._sizes: dict[StorageWeakRef, int] = {}
        self._from_before: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors_in((args, kwargs)):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference not in self._sizes and reference not in self._from_before:
                self._from_before.append(reference)
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(results):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference not in self._from_before:
                self._sizes[reference] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        return results

    def bytes_now(self) -> int:
        self._sizes = {each: size for each, size in self._sizes.items() if not each.expired()}
        return sum(self._sizes.values())


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def held_bytes(holder: object, besides: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of all tensors reachable from `holder`; shared memory counts once."""
    known = {storage for tensor in besides for storage, _ in _storages(tensor)}
    found = dict(each for tensor in _tensors(holder) for each in _storages(tensor))
    return sum(size for storage, size in found.items() if storage not in known)


def _storages(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    for each in (tensor, tensor.grad if tensor.is_leaf else None):
        if each is not None:
            storage = each.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _tensors(holder: object) -> Iterator[torch.Tensor]:
    waiting, seen = [holder], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _NOT_LOOKED_INTO):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += list(each)
        elif hasattr(each, "__dict__"):
            waiting.append(vars(each))
