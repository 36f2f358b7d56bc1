"""`drivetrain report`, `watch` and `compare`."""

from __future__ import annotations

import time
from pathlib import Path

from drivetrain.cli.terminal import terminal
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.files import write_whole
from drivetrain.core.text import readable_bytes
from drivetrain.record.reading import open_run


def report(address: str, output: str) -> int:
    """Write the page."""
    from drivetrain.diagnose.run import diagnose
    from drivetrain.view.describe import view_whole
    from drivetrain.view.page.report import report_page

    run = view_whole(open_run(address), time.time(), diagnose(address))
    _write_page(output, report_page(run, time.time()))
    return 0


def compare(here: str, there: str, output: str | None) -> int:
    """Show both; write a page too, if asked."""
    from drivetrain.view.compare import compare_runs
    from drivetrain.view.describe import view_whole
    from drivetrain.view.terminal.comparison import show_comparison

    runs = [view_whole(open_run(address), time.time()) for address in (here, there)]
    found = compare_runs(runs[0], runs[1])
    show_comparison(found, terminal(markup=False))
    if output is not None:
        from drivetrain.view.page.compare import compare_page

        _write_page(output, compare_page(found, time.time()))
    return 0


def watch(address: str, every_s: float, *, once: bool) -> int:
    """Until q; one frame when asked, or when nobody sees a screen."""
    from drivetrain.view.follow import RunFollower
    from drivetrain.view.terminal.live import watch_live, watch_once

    follower = RunFollower(open_run(address))
    console = terminal()
    if once or not console.is_terminal:
        watch_once(follower, console)
    else:
        try:
            watch_live(follower, console, every_s)
        except KeyboardInterrupt:
            return 0
    return 0


def _write_page(output: str, page: str) -> None:
    try:
        write_whole(Path(output), page)
    except OSError as error:
        rule, remedy = error.strerror or str(error), "give a file in a folder you may write to"
        raise ConfigError([Problem("--output", rule, remedy, output)]) from error
    console = terminal(markup=False, soft_wrap=True)
    console.print(f"{output}: {readable_bytes(len(page.encode()))}")
