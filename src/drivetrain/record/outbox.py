"""Outbox: hand something over in a microsecond, let a thread do the slow part.

`put` never waits. When the consumer falls behind by `capacity` items, new ones are counted and
dropped; when it fails, it is warned about once and not called again. A run goes on either way.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
PATIENCE_S = 30.0
"""How long the end of a run waits for a consumer: a sink may still be importing its library."""


class Outbox(Generic[Item]):
    """A bounded buffer in front of one consumer thread."""

    def __init__(
        self,
        name: str,
        consume: Callable[[Sequence[Item]], None],
        *,
        every_s: float = 0.5,
        capacity: int = 100_000,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """`at_end` is called in the thread, too, once everything else has been consumed."""
        self.name = name
        self.num_dropped = 0
        self._consume = consume
        self._at_end = at_end
        self._every_s = every_s
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._closing = threading.Event()
        self._failed = False
        self.is_held = False
        """While it is, nothing is consumed: for measuring one consumer beside another."""
        self._thread = threading.Thread(target=self._run, name=f"drivetrain-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand an item over; drops it when the consumer is hopelessly behind."""
        if len(self._items) < self._capacity:
            self._items.append(item)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Consume what is left, for at most `PATIENCE_S`."""
        timeout_s = PATIENCE_S
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            warnings.warn(
                f"{self.name}: still busy after {timeout_s:.0f} s; left behind", stacklevel=2
            )
        if self.num_dropped:
            warnings.warn(
                f"{self.name}: fell behind, {self.num_dropped} items dropped", stacklevel=2
            )

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            if not self.is_held:
                self._drain()
        self._drain()
        if self._at_end is not None:
            self._call(self._at_end)

    def _drain(self) -> None:
        items = [self._items.popleft() for _ in range(len(self._items))]
        if items and not self._failed:
            self._call(lambda: self._consume(items))

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._failed = True
            warnings.warn(f"{self.name} failed and is switched off: {error!r}", stacklevel=2)
