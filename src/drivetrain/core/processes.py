"""How this process and its child processes end."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from drivetrain.core.errors import STOPS, Preempted

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

# Whether this process ends because of a failure; cleanup at exit needs to know.
#
# A failing rank must not shut down its process group: the other ranks may be waiting in a
# collective that it never reaches, and NCCL's shutdown would wait for them.

_codes: list[int] = []
"""The exit code of this process, once it is known."""


def settle_exit_code(code: int) -> None:
    """Record the exit code; for code that catches a script's exception and ends the process."""
    _codes.append(code)


def is_failing() -> bool:
    """True if the process ends with an error; to be called at exit.

    A rank that was asked to stop has agreed on it with the others and does not count as failing.
    Python does not record a `SystemExit`: outside Drivetrain's launcher, a script that ends with
    sys.exit(1) looks successful. An error in a thread does not end the process.
    """
    if _codes:
        return _codes[-1] not in (0, Preempted.exit_code)
    if hasattr(sys, "ps1"):  # an interactive session outlives its errors
        return False
    error = getattr(sys, "last_value", None)  # set when an uncaught error is printed
    return error is not None and not isinstance(error, STOPS)


def is_interactive() -> bool:
    """True at a prompt and in a notebook."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


# Processes that multiprocessing started.

_PATIENCE_S = 5.0


def end_with_parent() -> None:
    """In a child process: exit when the parent process has ended, for whatever reason."""
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_child(process: BaseProcess) -> None:
    """Terminate a process, kill it if it does not end in time, and release its resources."""
    if process.is_alive():
        process.terminate()
        process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()
