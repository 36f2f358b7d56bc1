"""The live view: look, draw, wait for a key."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live

from drivetrain.view.follow import RunFollower
from drivetrain.view.terminal.keys import key_within, single_keys
from drivetrain.view.terminal.screen import screen


def watch_once(follower: RunFollower, console: Console) -> None:
    """One frame, as large as the terminal, or as a common one where there is none."""
    width, height = console.size
    frame = screen(follower.look(time.time()), width, height, foot="")
    console.print(frame, height=height)


def watch_live(follower: RunFollower, console: Console, every_s: float) -> None:
    """Until q, or Ctrl-C. A frame that took long to read is not followed at once by the next."""
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            run = follower.look(time.time())
            width, height = console.size
            foot = f"q quits · every {every_s:g} s · {time.strftime('%H:%M:%S')}"
            live.update(screen(run, width, height, foot), refresh=True)
            took_s = time.monotonic() - began_s
            if (key_within(max(every_s - took_s, took_s)) or "").lower() == "q":
                return
