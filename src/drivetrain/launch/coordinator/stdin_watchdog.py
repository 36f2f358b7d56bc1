"""`drivetrain train` that stops when its stdin closes: `python -m …stdin_watchdog ARGS`.

The process that started it, over ssh or on the same machine, holds its standard input open. A line
there, or its end, asks the run to save and stop. So nothing keeps running on the host when that
process or the connection is lost. With --variables-on-stdin, the first line is a JSON object of
environment variables for the run.
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
    """Wait for input or the end of stdin, then ask the run to stop."""
    with contextlib.suppress(OSError):  # treated as closed
        os.read(stdin, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def variables_from(stdin: int) -> dict[str, str] | None:
    """Read only the first line; None if stdin is closed already."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(stdin, 1)):
            return None
        line += byte
    found: dict[str, str] = json.loads(line)
    return found


def main(argv: list[str]) -> int:
    """Run `drivetrain train`; return its exit code."""
    if argv[:1] == [FROM_STDIN]:
        argv = argv[1:]
        variables = variables_from(0)
        if variables is None:
            return PREEMPTED_CODE
        os.environ |= variables
    stdin = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the ranks must not read from it or keep it open
    os.close(nothing)
    threading.Thread(target=_hold, args=(stdin,), daemon=True).start()
    return guard(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
