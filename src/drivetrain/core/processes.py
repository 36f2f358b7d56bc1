"""How this process ends, and those it started."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from drivetrain.core.errors import Preempted

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Is this process ending because something failed? Asked by what cleans up at exit.
#
# A rank that fails must not take leave of its process group: the others may wait in a collective it
# will never come to, and NCCL's shutdown would wait for them.

_codes: list[int] = []
"""The exit code this process ends with, once that is settled."""


def settle_exit_code(code: int) -> None:
    """For one who catches what ends a script, and ends the process in its place."""
    _codes.append(code)


def is_failing() -> bool:
    """Whether the process ends with an error; to be asked at exit.

    A rank that was asked to stop has agreed on it with the others, and ends well. Python tells
    nobody of a `SystemExit`: outside of Drivetrain's launcher, a script that ends by sys.exit(1)
    looks as if it ended well. An error in a thread does not end a process.
    """
    if _codes:
        return _codes[-1] not in (0, Preempted.exit_code)
    if hasattr(sys, "ps1"):  # an interactive session outlives its errors
        return False
    error = getattr(sys, "last_value", None)  # set when an error that nobody caught is printed
    return error is not None and not isinstance(error, Preempted)


# Processes that multiprocessing started.

_PATIENCE_S = 5.0


def end_with_parent() -> None:
    """In such a process: end when the one that started it is gone, however it ended."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_child(process: BaseProcess) -> None:
    """Ask it to end, insist after a while, and leave nothing of it behind."""
    if process.is_alive():
        process.terminate()
        process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()
