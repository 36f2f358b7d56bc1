"""The terminal: the screen's panels, the live view, and two runs as tables."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from drivetrain.core.text import counted, readable_rate
from drivetrain.view.compare import Row, RunComparison
from drivetrain.view.follow import RunFollower
from drivetrain.view.run_view import RunView
from drivetrain.view.series import number_text
from drivetrain.view.summary import typical
from drivetrain.view.terminal.panels import (
    attempt_lines,
    curve_lines,
    event_lines,
    expert_lines,
    header_line,
    ledger_lines,
    rank_lines,
    slowest_sentence,
)

# The screen: its panels and their layout.

_RATES = ("throughput/tokens_per_sec", "throughput/samples_per_sec")
Draw = Callable[[int, int], Sequence[Text]]


def screen(run: RunView, width: int, height: int, foot: str = "q quits") -> Layout:
    """Return one frame of exactly that size."""
    top = max(7, (height - 2) * 2 // 5)
    bottom = max(5, (height - 2 - top) * 2 // 5)
    middle = max(3, height - 2 - top - bottom)
    left = width * 3 // 5
    rate = next((name for name in _RATES if not run.scalar(name).is_empty), _RATES[-1])
    loss, rates = run.scalar("train/loss"), run.scalar(rate)
    typical_rate = typical(run, rate)
    panels = {
        "loss": _panel(
            "loss", number_text(loss.last), (left, top), lambda w, h: curve_lines(loss, w, h)
        ),
        "rate": _panel(
            rate.rpartition("/")[2].replace("_per_sec", "/s"),
            readable_rate(typical_rate) if typical_rate is not None else "",
            (width - left, top),
            lambda w, h: curve_lines(rates, w, h, is_rate=True),
        ),
        "ranks": _panel(*_rank_title(run), (left, middle), lambda w, h: _rank_lines(run, w, h)),
        "ledger": _panel(
            "time",
            "" if run.ledger is None else f"goodput {run.ledger.share('productive'):.0%}",
            (width - left, middle),
            lambda w, h: ledger_lines(run.ledger, w, h),
        ),
        "events": _panel("last events", "", (left, bottom), lambda _, h: event_lines(run, h)),
        "attempts": _panel(
            "attempts",
            str(len(run.attempts)),
            (width - left, bottom),
            lambda _, h: attempt_lines(run, h),
        ),
    }
    load, below = run.expert_load, "attempts"
    if load is not None and len(run.attempts) <= 1:  # the header already describes a single attempt
        below = "experts"
        panels["experts"] = _panel(
            "experts",
            f"up to step {load.step:,}",
            (width - left, bottom),
            lambda w, h: expert_lines(load, w, h),
        )
    layout = Layout()
    layout.split_column(
        Layout(header_line(run, width), size=1),
        _row(panels, ("loss", "rate"), left, top),
        _row(panels, ("ranks", "ledger"), left, middle),
        _row(panels, ("events", below), left, bottom),
        Layout(Text(f" {foot}", style="dim", no_wrap=True, overflow="ellipsis"), size=1),
    )
    return layout


def _row(panels: dict[str, Panel], names: tuple[str, str], left: int, height: int) -> Layout:
    row = Layout(size=height)
    row.split_row(Layout(panels[names[0]], size=left), Layout(panels[names[1]]))
    return row


def _panel(title: str, aside: str, size: tuple[int, int], draw: Draw) -> Panel:
    width, height = size
    lines = list(draw(width - 4, height - 2))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    heading = Text.assemble((title, "bold default"), (f"  {aside}" if aside else "", "default"))
    return Panel(
        Group(*lines),
        title=heading,
        title_align="left",
        box=box.ROUNDED,
        border_style="grey37",
        width=width,
        height=height,
    )


def _rank_title(run: RunView) -> tuple[str, str]:
    if run.recent is None:
        return "ranks", ""
    shown, every = len(run.recent.ranks), run.recent.num_ranks
    title = counted(every, "rank") if shown == every else f"{shown:,} of {every:,} ranks"
    return title, slowest_sentence(run.recent)


def _rank_lines(run: RunView, width: int, height: int) -> list[Text]:
    if run.recent is None:
        return [Text("no steps yet", style="dim")]
    return rank_lines(run.recent, width, height)


# The live view: read, draw, wait for a key.


@contextmanager
def single_keys() -> Iterator[None]:
    """Put the terminal in cbreak mode (keys at once, no echo), and restore it at the end."""
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
    """Return the keys pressed within that time; empty if none."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    # not through sys.stdin, which buffers input that select() then does not see
    return os.read(sys.stdin.fileno(), 1024).decode(errors="replace") if ready else ""


_NOTICED_S = 0.2
"""How soon a resized terminal is redrawn."""


def watch_once(follower: RunFollower, console: Console) -> None:
    """Print one frame of the terminal's size, or of a default size without a terminal."""
    width, height = console.size
    frame = screen(follower.look(time.time()), width, height, foot="")
    console.print(frame, height=height)


Frame = Callable[[int, int, str], RenderableType]
"""Draws a frame of a width and a height, with a line of text below."""


def watch_live(follower: RunFollower, console: Console, every_s: float) -> None:
    """Show a run until the user quits."""
    follow_live(lambda: partial(screen, follower.look(time.time())), console, every_s)


def follow_live(look: Callable[[], Frame], console: Console, every_s: float) -> None:
    """Redraw until q, Ctrl-C or SIGTERM; wait at least as long as reading a frame took."""
    with _ended_in_order(), single_keys(), _screen_of(console) as live:
        while True:
            began_s = time.monotonic()
            frame = look()
            foot = f"q quits · every {every_s:g} s · {time.strftime('%H:%M:%S')}"
            drawn = _draw(live, frame, foot)
            took_s = time.monotonic() - began_s
            redraw = partial(_draw, live, frame, foot)
            if _quits_within(max(every_s - took_s, took_s), live, drawn, redraw):
                return


def _screen_of(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False)


def _draw(live: Live, frame: Frame, foot: str) -> ConsoleDimensions:
    """Draw a frame; return the size that was drawn, since the terminal may be resized."""
    size = live.console.size
    live.update(frame(size.width, size.height, foot), refresh=True)
    return size


def _quits_within(
    seconds: float,
    live: Live,
    drawn: ConsoleDimensions,
    redraw: Callable[[], ConsoleDimensions],
) -> bool:
    """Wait, redrawing after a resize; any key ends it. Return whether q was pressed."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        pressed = keys_within(min(left_s, _NOTICED_S))
        if pressed:
            return "q" in pressed.lower()
        if live.console.size != drawn:
            drawn = redraw()
    return False


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Two runs as tables in a terminal.


def show_comparison(comparison: RunComparison, console: Console) -> None:
    """Print the outcomes first, then the differences in config and environment."""
    for title, rows, nothing in (
        ("outcome", comparison.outcome, ""),
        ("last values", comparison.metrics, "neither run has recorded a scalar"),
        ("where the time went", comparison.ledger, "one of the runs has no ledger yet"),
        ("config that differs", comparison.config, "none: every key is the same"),
        (
            "where it ran, if that differs",
            comparison.facts,
            "host, versions and layout are the same",
        ),
    ):
        console.print(f"\n{title}", style="bold")
        if rows:
            console.print(_table(rows, comparison.names))
        else:
            console.print(f"  {nothing}", style="dim")


def _table(rows: Sequence[Row], names: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold", min_width=22)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("change", justify="right")
    for row in rows:
        table.add_row(f"  {row.name}", row.here, row.there, row.change)
    return table
