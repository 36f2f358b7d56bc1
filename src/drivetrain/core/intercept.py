"""Stop a script just before it trains, and take its task, config and data.

The planner and the rehearsal run the user's script unchanged inside `intercepting()`. `Trainer.fit`
then raises an exception that carries the task, config and data. `prepare` raises another one,
because what the user's own loop does is not known before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_is_on: ContextVar[bool] = ContextVar("intercepting", default=False)


class Intercepted(BaseException):
    """Raised by `Trainer.fit`. Not an Exception, so that `except Exception` does not catch it."""

    def __init__(self, task: Any, resolved: Any, batch: Callable[[int], Any]) -> None:
        super().__init__("the script was stopped before training")
        self.task = task
        self.resolved = resolved
        self.batch = batch
        """`batch(n)` returns n collated samples of the training data."""


class OwnLoopMet(BaseException):
    """Raised by `prepare`: the script has its own training loop. Not an Exception, as above."""


@contextmanager
def intercepting() -> Iterator[None]:
    """Inside this context, `Trainer.fit` raises `Intercepted` and `prepare` raises `OwnLoopMet`."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def is_intercepting() -> bool:
    """True inside `intercepting()`."""
    return _is_on.get()
