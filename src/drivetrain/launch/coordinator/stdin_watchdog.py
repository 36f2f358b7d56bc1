"""`drivetrain train` that stops when its stdin closes: `python -m …stdin_watchdog ARGS`.

Who started it, over ssh or on the same machine, holds its standard input. A line there, or its end,
asks the run to save and stop; so when the starter is gone, or the connection to it, nothing is left
running on the host. With --variables-on-stdin the first line is the run's: variables, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading

from drivetrain.launch.coordinator.member import FROM_STDIN
from drivetrain.launch.guardian import guard
from drivetrain.supervise.policy import PREEMPTED_CODE


def _hold(stdin: int) -> None:
    """Until a line comes, or the other end is let go."""
    with contextlib.suppress(OSError):  # as good as gone
        os.read(stdin, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def variables_from(stdin: int) -> dict[str, str] | None:
    """The first line, and not a byte more; None when who started it is gone already."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(stdin, 1)):
            return None
        line += byte
    found: dict[str, str] = json.loads(line)
    return found


def main(argv: list[str]) -> int:
    """The exit code of the run."""
    if argv[:1] == [FROM_STDIN]:
        argv = argv[1:]
        variables = variables_from(0)
        if variables is None:
            return PREEMPTED_CODE
        os.environ |= variables
    stdin = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the ranks are not to read from it, or to keep it open
    os.close(nothing)
    threading.Thread(target=_hold, args=(stdin,), daemon=True).start()
    return guard(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
