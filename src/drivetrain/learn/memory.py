"""Track how many bytes autograd keeps for backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class SavedBytes:
    """Bytes of tensors saved for backward: now, and at the peak. A storage counts once."""

    def __init__(self, not_counted: Iterable[torch.Tensor] = ()) -> None:
        self.now = 0
        self.peak = 0
        self._uses: Counter[int] = Counter()
        self._not_counted = {tensor.untyped_storage().data_ptr() for tensor in not_counted}

    @contextmanager
    def counting(self) -> Iterator[SavedBytes]:
        """Count during the forward and backward inside this context."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _Kept.tensor_of):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._not_counted:
            self._uses[place] += 1
            if self._uses[place] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(kept, self._release, place, size)
        return kept

    def _release(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if self._uses[place] == 0:
            self.now -= size


class _Kept:
    """Held by the graph instead of the tensor: deleted when the graph releases it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tensor_of(self) -> torch.Tensor:
        return self._tensor
