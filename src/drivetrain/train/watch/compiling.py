"""Report compilation: torch may compile during any step, for minutes, which is not a stall.

Dynamo calls back when it begins and ends, also for the deferred compilation of a backward pass and
the recording of CUDA graphs, so a step without compilation costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from drivetrain.record.session import ProgressPage


@contextmanager
def announcing(page: ProgressPage, then: Callable[[], None]) -> Iterator[None]:
    """Mark compilation on the rank's progress page, and call `then` at its end."""
    from torch._dynamo.callback import callback_handler  # imported with the first optimizer

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
        with suppress(ValueError):  # torch._dynamo.reset() removes all callbacks
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
