"""Keys, one at a time and without Enter, where there is a keyboard."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[None]:
    """The terminal hands over each key as it is pressed, and shows none; put back at the end."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def keys_within(seconds: float) -> str:
    """What was pressed within that time, several keys if they came at once; empty for nothing."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    # not through sys.stdin, which reads ahead what select() then knows nothing of
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace") if ready else ""
