"""Compiling: torch may compile in the middle of any step, for minutes, and it is no stall.

Dynamo calls back when it begins and when it is done, the deferred compilation of a backward pass
and the recording of CUDA graphs included: a step in which nothing is compiled costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from drivetrain.record.session import ProgressPage


@contextmanager
def announcing(page: ProgressPage, then: Callable[[], None]) -> Iterator[None]:
    """Say it on the rank's page for as long as torch compiles, and call `then` when it is done."""
    from torch._dynamo.callback import callback_handler  # loaded with the first optimizer

    def begin(_: object) -> None:
        page.compiling(now=True)

    def end(_: object) -> None:
        page.compiling(now=False)
        then()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() forgets all of them
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
