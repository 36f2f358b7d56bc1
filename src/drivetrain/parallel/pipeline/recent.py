"""The schedules used last. Each has buffers for every micro-batch, so only a few are kept."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST = 4
_SHAPES_BEFORE_A_WORD = 4 * MOST
_SHAPES_KNOWN = 1024

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """At most so many values, those used last. Ranks that ask alike drop alike."""

    def __init__(self, most: int, release: Callable[[Value], None] = lambda _: None) -> None:
        self._most = most
        self._release = release
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What is kept under the key, or is made and kept."""
        if key not in self._values:
            while len(self._values) >= self._most:  # before another takes memory
                self._release(self._values.popitem(last=False)[1])
            self._values[key] = make()
        self._values.move_to_end(key)
        return self._values[key]


class KnownShapes(Recent[Value]):
    """What stages hand on for micro-batches of each shape; says once that shapes keep changing."""

    def __init__(self, *, speaks: bool) -> None:
        super().__init__(_SHAPES_KNOWN)
        self._speaks = speaks
        self._met = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """As it is known, or found out by running a micro-batch through all stages."""
        return super().get(key, lambda: self._find_out(make))

    def _find_out(self, make: Callable[[], Value]) -> Value:
        self._met += 1
        if self._speaks and self._met == _SHAPES_BEFORE_A_WORD:
            warnings.warn(
                f"micro-batches keep changing shape ({self._met} so far): for each new one the "
                "pipeline runs a forward pass to learn what its stages hand on, and gets new "
                "buffers; pad samples to a few lengths",
                stacklevel=2,
            )
        return make()
