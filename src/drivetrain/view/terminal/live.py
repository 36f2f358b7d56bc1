"""The live view: look, draw, wait for a key."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from drivetrain.view.follow import RunFollower
from drivetrain.view.run_view import RunView
from drivetrain.view.terminal.screen import screen


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


_NOTICED_S = 0.2
"""How soon a terminal of another size is drawn anew."""


def watch_once(follower: RunFollower, console: Console) -> None:
    """One frame, as large as the terminal, or as a common one where there is none."""
    width, height = console.size
    frame = screen(follower.look(time.time()), width, height, foot="")
    console.print(frame, height=height)


def watch_live(follower: RunFollower, console: Console, every_s: float) -> None:
    """Until q, Ctrl-C or SIGTERM. A frame that took long to read is not followed by the next."""
    with _ended_in_order(), single_keys(), _screen_of(console) as live:
        while True:
            began_s = time.monotonic()
            run = follower.look(time.time())
            foot = f"q quits · every {every_s:g} s · {time.strftime('%H:%M:%S')}"
            _draw(live, run, foot)
            took_s = time.monotonic() - began_s
            if _quits_within(max(every_s - took_s, took_s), live, lambda: _draw(live, run, foot)):  # noqa: B023 - called before the next look
                return


def _screen_of(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False)


def _draw(live: Live, run: RunView, foot: str) -> None:
    width, height = live.console.size
    live.update(screen(run, width, height, foot), refresh=True)


def _quits_within(seconds: float, live: Live, redraw: Callable[[], None]) -> bool:
    """Whether q was pressed; any other key ends the wait. Drawn again when the size has changed."""
    until_s, size = time.monotonic() + seconds, live.console.size
    while (left_s := until_s - time.monotonic()) > 0:
        pressed = keys_within(min(left_s, _NOTICED_S))
        if pressed:
            return "q" in pressed.lower()
        if live.console.size != size:
            size = live.console.size
            redraw()
    return False


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM leaves by the way that gives the terminal back."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
