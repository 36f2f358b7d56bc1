"""How many bytes are alive: every storage a rank makes, from its making to its end.

It counts what tensors hold. What a caching allocator keeps back, workspaces of libraries and a
device's own context come on top, and are not known here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from drivetrain.rehearse.lines import Line, here

_LOOK_AGAIN = 1.02
"""A peak's line is looked up when it is so much higher: walking the stack is not free."""


class LiveBytes:
    """Counts, and remembers the highest."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.peak_line: Line | None = None
        self.over: tuple[str, Line | None] | None = None
        """What was going on, and where, when the limit was first passed."""
        self.doing = "building the model"
        self._limit: int | None = None
        self._looked_at = 0
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def see(self, made: Any) -> None:
        """Whatever tensors an operator has given."""
        if isinstance(made, torch.Tensor):
            self._see(made)
        elif made is not None:
            for leaf in tree_leaves(made):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)

    def watch(self, limit: int | None) -> None:
        """From here on: a model is built in the host's memory, and only then placed."""
        self.peak, self._looked_at, self._limit = 0, 0, limit
        self._count(0)

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP frees and fills storages in place, which no operator shows."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._sizes.get(id(storage))
            if known is not None and known[0]() is storage:
                self._count(storage.nbytes() - known[1])
                self._sizes[id(storage)] = (known[0], storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a wrapper: what it wraps is seen by itself
            return
        key = id(storage)
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            last = self._sizes.pop(key, None)
            if last is not None:
                self.live -= last[1]

        self._sizes[key] = (weakref.ref(storage, gone), size)
        self._count(size)

    def _count(self, num_bytes: int) -> None:
        self.live += num_bytes
        if self.live <= self.peak:
            return
        self.peak = self.live
        if self.peak > self._looked_at * _LOOK_AGAIN:
            self._looked_at = self.peak
            self.peak_line = here()
        if self._limit is not None and self.over is None and self.live > self._limit:
            self.over = (self.doing, here())
