"""What rank 0 shows during a run: lines through the logger `drivetrain`, or a progress bar.

Lines are printed unchanged on standard output. A level set on the logger drops lines below it (a
warning starts with that word). If the logger has its own handlers, they receive all lines instead.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from drivetrain.core.text import readable_duration, readable_rate

LOGGER = logging.getLogger("drivetrain")
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)  # the root logger's default would drop all but warnings


def _log(message: str, show: Callable[[str], None]) -> None:
    level = logging.WARNING if message.startswith("warning") else logging.INFO
    if LOGGER.handlers:
        LOGGER.log(level, "%s", message)
    elif LOGGER.isEnabledFor(level):
        show(message)


@dataclass(frozen=True)
class Snapshot:
    """The values shown for a step."""

    step: int
    total_steps: int | None
    loss: float
    learning_rate: float
    grad_norm: float | None
    samples_per_s: float
    tokens_per_s: float | None
    eta_s: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the loss, by name."""

    def fields(self) -> list[tuple[str, str]]:
        """Return name and value of each available figure, in display order."""
        shown = [("loss", f"{self.loss:.4f}")]
        shown += [(name, f"{value:.4f}") for name, value in self.parts.items()]
        shown.append(("lr", f"{self.learning_rate:.2e}"))
        if self.grad_norm is not None:
            shown.append(("grad norm", f"{self.grad_norm:.3f}"))
        shown.append(("samples/s", readable_rate(self.samples_per_s)))
        if self.tokens_per_s is not None:
            shown.append(("tokens/s", readable_rate(self.tokens_per_s)))
        if self.eta_s is not None:
            shown.append(("ETA", readable_duration(self.eta_s)))
        return shown


class Progress(Protocol):
    """Shows snapshots and messages."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the run's progress."""
        ...

    def say(self, message: str) -> None:
        """Print a line that stays."""
        ...

    def close(self) -> None:
        """Release the terminal."""
        ...


class Quiet:
    """Shows nothing; for every rank but 0."""

    def show(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainLines:
    """One line per snapshot: for files, pipes and schedulers' logs. At most one a second."""

    def __init__(self, min_interval_s: float = 1.0) -> None:
        self._min_interval_s = min_interval_s
        self._last_s = float("-inf")

    def show(self, snapshot: Snapshot) -> None:
        """Print a line, unless the last one is too recent; the run's last step is always shown."""
        now_s = time.monotonic()
        is_last = snapshot.step == snapshot.total_steps
        if now_s - self._last_s < self._min_interval_s and not is_last:
            return
        self._last_s = now_s
        total = f"/{snapshot.total_steps}" if snapshot.total_steps else ""
        figures = "  ".join(f"{name} {value}" for name, value in snapshot.fields())
        self.say(f"step {snapshot.step}{total}  {figures}")

    def say(self, message: str) -> None:
        _log(message, _print)

    def close(self) -> None:
        """Nothing to release."""


def _print(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


class RichLine:
    """A progress bar with figures, refreshed by the training loop, not by a thread."""

    def __init__(self, total_steps: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("train", total=total_steps, figures="")
        self._progress.start()
        self._last_s = float("-inf")

    def show(self, snapshot: Snapshot) -> None:
        """Redraw at most ten times a second."""
        now_s = time.monotonic()
        if now_s - self._last_s < 0.1 and snapshot.step != snapshot.total_steps:
            return
        self._last_s = now_s
        figures = "  ".join(f"[dim]{name}[/] {value}" for name, value in snapshot.fields())
        self._progress.update(self._task, completed=snapshot.step, figures=figures, refresh=True)

    def say(self, message: str) -> None:
        """Print above the bar."""
        _log(
            message, lambda text: self._progress.console.print(text, markup=False, highlight=False)
        )

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()


def make_progress(kind: str, total_steps: int | None, *, is_main: bool) -> Progress:
    """Create the configured kind of progress; `auto` depends on whether stdout is a terminal."""
    if not is_main or kind == "none":
        return Quiet()
    if kind == "rich" or (kind == "auto" and sys.stdout.isatty()):
        return RichLine(total_steps)
    return PlainLines()
