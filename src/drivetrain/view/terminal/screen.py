"""The screen: which panels there are, and how they share the room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group
from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from drivetrain.core.text import readable_rate
from drivetrain.view.figures import typical
from drivetrain.view.run_view import RunView
from drivetrain.view.scale import number_text
from drivetrain.view.terminal.panels import (
    attempt_lines,
    curve_lines,
    event_lines,
    header_line,
    ledger_lines,
)
from drivetrain.view.terminal.rank_panel import rank_lines, slowest_sentence

_RATES = ("throughput/tokens_per_sec", "throughput/samples_per_sec")
Draw = Callable[[int, int], Sequence[Text]]


def screen(run: RunView, width: int, height: int, foot: str = "q quits") -> Layout:
    """One frame of exactly that size."""
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
    layout = Layout()
    layout.split_column(
        Layout(header_line(run, width), size=1),
        _row(panels, ("loss", "rate"), left, top),
        _row(panels, ("ranks", "ledger"), left, middle),
        _row(panels, ("events", "attempts"), left, bottom),
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
    title = f"{every:,} ranks" if shown == every else f"{shown:,} of {every:,} ranks"
    return title, slowest_sentence(run.recent)


def _rank_lines(run: RunView, width: int, height: int) -> list[Text]:
    if run.recent is None:
        return [Text("no steps yet", style="dim")]
    return rank_lines(run.recent, width, height)
