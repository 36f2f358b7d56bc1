"""`drivetrain watch` in a real terminal: it is given back as it was."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, ConsoleDimensions

from benchmarks.reading.made_run import MadeRun, make_run
from drivetrain.view.terminal.screen import _quits_within, _screen_of

_PATIENCE_S = 60.0
_ALTERNATE, _BACK, _CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal with `drivetrain watch` in it."""

    def __init__(self, run: Path, columns: int, lines: int) -> None:
        self._keyboard, self.screen = pty.openpty()
        self.resize(columns, lines)
        self.before = self.state()
        words = [sys.executable, "-m", "drivetrain", "watch", str(run), "--every", "60"]
        plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            words,
            stdin=self.screen,
            stdout=self.screen,
            stderr=self.screen,
            env={**plain, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self.shown = ""

    def state(self) -> list[Any]:
        """Echo, line mode and all."""
        return termios.tcgetattr(self.screen)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def see(self, pattern: str) -> None:
        """Read until it is there."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline_s, f"{pattern!r} is not in {self.shown!r}"
            self._read(0.1)

    def end(self) -> int:
        """Its exit code, when all it wrote has been read."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, "it did not end"
            self._read(0.05)
        self._read(0.2)
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        if select.select([self._keyboard], [], [], seconds)[0]:
            self.shown += os.read(self._keyboard, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._keyboard)
        os.close(self.screen)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    make_run(tmp_path / "run", MadeRun(8, 60, has_failure=False))
    # tests that were started in the background ignore it, and what they start would, too
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    made = Terminal(tmp_path / "run", 80, 24)
    made.see("q quits")
    yield made
    made.close()
    signal.signal(signal.SIGINT, before)


def assert_given_back(terminal: Terminal) -> None:
    assert terminal.state() == terminal.before
    assert terminal.shown.rindex(_BACK) > terminal.shown.rindex(_ALTERNATE)
    assert terminal.shown.rindex(_CURSOR) > terminal.shown.rindex("q quits")


def test_another_size_is_drawn_at_once_and_q_gives_the_terminal_back(terminal: Terminal) -> None:
    assert terminal.state() != terminal.before  # keys come one by one
    terminal.shown = terminal.shown[-200:]
    terminal.resize(120, 40)
    terminal.see("─{60}")  # the upper edge of a panel that 80 columns have no room for
    terminal.see("q quits")
    terminal.shown = _ALTERNATE + terminal.shown
    terminal.press("xq")  # two keys in one read
    assert terminal.end() == 0
    assert_given_back(terminal)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_signal_gives_the_terminal_back(number: int, code: int, terminal: Terminal) -> None:
    terminal.process.send_signal(number)
    assert terminal.end() == code
    assert_given_back(terminal)


def test_a_size_that_changed_while_a_frame_was_drawn_is_noticed() -> None:
    live = _screen_of(Console(file=io.StringIO(), width=120, height=40))
    redrawn: list[ConsoleDimensions] = []

    def redraw() -> ConsoleDimensions:
        redrawn.append(live.console.size)
        return live.console.size

    assert not _quits_within(0.3, live, ConsoleDimensions(80, 24), redraw)
    assert redrawn == [ConsoleDimensions(120, 40)]
