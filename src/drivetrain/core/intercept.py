"""Stop a script where it is about to train, and take what it would have trained.

`Trainer.fit` asks here first. A planner or a rehearsal runs the user's script unchanged inside
`intercepting()`, and is handed its task, config and data by the exception that ends it.
`prepare` asks, too: what a loop of one's own does is not known before it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_is_on: ContextVar[bool] = ContextVar("intercepting", default=False)


class Intercepted(BaseException):
    """Not an Exception: a script's own `except Exception` must not swallow it."""

    def __init__(self, task: Any, resolved: Any, batch: Callable[[int], Any]) -> None:
        super().__init__("the script was stopped before training")
        self.task = task
        self.resolved = resolved
        self.batch = batch
        """`batch(n)`: n samples of the training data, collated."""


class OwnLoopMet(BaseException):
    """The script trains in a loop of its own. As above, no Exception."""


@contextmanager
def intercepting() -> Iterator[None]:
    """While this lasts, `Trainer.fit` raises `Intercepted` and `prepare` `OwnLoopMet`."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def is_intercepting() -> bool:
    """Whether someone wants what is about to be trained."""
    return _is_on.get()
