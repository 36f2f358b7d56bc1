"""`drivetrain status`, `runs`, `report`, `watch`, `compare` and `diagnose`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drivetrain.cli.reading import reading
from drivetrain.cli.say import say
from drivetrain.cli.terminal import terminal
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.files import write_whole
from drivetrain.core.text import readable_bytes, readable_duration, readable_rate
from drivetrain.diagnose.finding import Finding, Severity
from drivetrain.record.ledger import BETWEEN_RUNS, CLASSES, COLOURS, LABELS, Ledger
from drivetrain.record.reading import open_run
from drivetrain.record.status import RunStatus, status_of
from drivetrain.tune import is_study

# `drivetrain status` and `drivetrain runs`.

_STATE_COLOURS = {
    "running": "bold cyan",
    "finished": "bold green",
    "failed": "bold red",
    "stalled": "bold red",
    "preempted": "bold yellow",
}


def status(address: str, *, as_json: bool) -> int:
    found = status_of(open_run(address), time.time())
    if as_json:
        print_json(as_document(found))
        return 0
    console = terminal()
    console.print(headline(found))
    for line in figures(found):
        console.print(Text(f"  {line}"))
    if found.ledger.wall_s > 0:
        console.print()
        console.print(bar(found.ledger, min(console.width, 100) - 4))
        console.print(ledger_table(found.ledger))
    return 0


def runs(folder: str, *, as_json: bool) -> int:
    """List every run under a folder, most recently active first."""
    root = Path(folder)
    if not root.is_dir():
        remedy = "give the folder that holds runs (output_dir; default: runs)"
        raise ConfigError([Problem("DIR", "no such directory", remedy, folder)])
    found, damaged = [], []
    for path in run_folders(root):
        try:
            with reading(str(path)):
                found.append(_readable(status_of(open_run(path), time.time())))
        except DamagedRun as error:  # the others are still shown
            damaged.append((path, str(error)))
    found.sort(key=lambda each: each.last_sign_s, reverse=True)
    if as_json:
        bad = [{"name": path.name, "state": "damaged", "reason": why} for path, why in damaged]
        print_json([*(as_document(each) for each in found), *bad])
        return 0
    console = terminal()
    if found:
        console.print(runs_table(found, time.time()))
    elif not damaged:
        console.print(f"no runs in {folder}", markup=False)
    for path, why in damaged:
        console.print(f"{path.name}  damaged: {why}", markup=False, soft_wrap=True)
    return 0


def _readable(found: RunStatus) -> RunStatus:
    """Render this run alone, so that an error in its data is reported as this run's."""
    runs_table([found], 0.0)
    as_document(found)
    return found


def run_folders(root: Path, depth: int = 3) -> list[Path]:
    """Folders that hold a run; does not descend into a run."""
    if (root / "attempts").is_dir():
        return [root]
    if depth == 0:
        return []
    try:
        inner = [Path(entry.path) for entry in os.scandir(root) if entry.is_dir()]
    except OSError:  # this user may not list it
        return []
    return [run for each in sorted(inner) for run in run_folders(each, depth - 1)]


def headline(found: RunStatus) -> Text:
    """Name, state and step of a run."""
    text = Text(found.name, style="bold")
    text.append("  ")
    text.append(found.state, style=_STATE_COLOURS.get(found.state, "bold"))
    of = f" of {found.max_steps:,}" if found.max_steps else ""
    text.append(f"  step {found.step:,}{of}")
    return text


def figures(found: RunStatus) -> list[str]:
    """The known figures of a run, one line each."""
    attempts = f"{found.num_attempts} attempt{'s' if found.num_attempts != 1 else ''}"
    ranks = f"{found.world_size:,} rank{'s' if found.world_size != 1 else ''}"
    where = f" ({found.layout})" if found.layout and found.layout != ranks else ""
    lines = [f"{ranks}{where} on {found.device or 'unknown devices'}, {attempts}"]
    lines += [f"a start was lost before its attempt began: {how}" for how in found.lost_starts]
    if found.reason:
        lines.append(f"last attempt: {found.reason}")
    rates = [f"loss {found.loss:.4f}"] if found.loss is not None else []
    if found.samples_per_s is not None:
        rates.append(f"{readable_rate(found.samples_per_s)} samples/s")
    if found.tokens_per_s is not None:
        rates.append(f"{readable_rate(found.tokens_per_s)} tokens/s")
    if found.mfu is not None:
        rates.append(f"MFU {found.mfu:.1%}")
    if rates:
        lines.append(f"latest: {', '.join(rates)}")
    ledger = found.ledger
    if ledger.wall_s > 0:
        ago = readable_duration(max(0.0, time.time() - ledger.end_s))
        lines.append(
            f"goodput {ledger.goodput:.1%} of {readable_duration(ledger.wall_s)}, "
            f"last heartbeat {ago} ago"
        )
    if found.money is not None:
        lost = found.money.spent - found.money.productive
        lines.append(f"cost {found.money.spent:,.2f}, of which {lost:,.2f} was not productive")
    return lines


def bar(ledger: Ledger, width: int) -> Text:
    """The ledger as a bar one line high: each class in proportion to its seconds."""
    shown = {name: s for name, s in ledger.seconds.items() if s > 0}
    text = Text("  ")
    total, drawn, passed = sum(shown.values()), 0, 0.0
    for name, seconds in shown.items():
        passed += seconds
        upto = round(width * passed / total)
        text.append("█" * (upto - drawn), style=COLOURS[name])
        drawn = upto
    return text


def ledger_table(ledger: Ledger) -> Table:
    """Seconds and share of each class that has any."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    seconds = ledger.seconds
    for name in CLASSES:
        if seconds[name] >= 0.0005:
            label = Text("■ ", style=COLOURS[name]) + Text(LABELS[name], style="default")
            table.add_row(label, f"{seconds[name]:,.1f} s", f"{ledger.share(name):.1%}")
    of = f", mean of {ledger.num_ranks} ranks" if ledger.num_ranks > 1 else ""
    table.add_row(Text(f"wall clock{of}", style="bold"), f"{ledger.wall_s:,.1f} s", "")
    if ledger.between_runs_s:
        table.add_row(Text(BETWEEN_RUNS, style="dim"), f"{ledger.between_runs_s:,.1f} s", "")
    return table


def runs_table(found: list[RunStatus], now_s: float) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("run", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "loss", "ranks", "attempts", "goodput", "wall clock", "last sign"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            Text(each.name),
            Text(each.state, style=_STATE_COLOURS.get(each.state, "")),
            f"{each.step:,}" + (f"/{each.max_steps:,}" if each.max_steps else ""),
            "" if each.loss is None else f"{each.loss:.4f}",
            f"{each.world_size:,}",
            str(each.num_attempts),
            f"{each.ledger.goodput:.0%}" if each.ledger.wall_s else "",
            readable_duration(each.ledger.wall_s),
            f"{readable_duration(max(0.0, now_s - each.last_sign_s))} ago",
        )
    return table


def as_document(found: RunStatus) -> dict[str, Any]:
    ledger, money = found.ledger, found.money
    names = ("name", "state", "reason", "step", "max_steps", "num_attempts", "world_size", "layout")
    rates = ("device", "loss", "samples_per_s", "tokens_per_s", "mfu", "last_sign_s", "lost_starts")
    return {
        **{name: getattr(found, name) for name in (*names, *rates)},
        "wall_s": ledger.wall_s,
        "between_runs_s": ledger.between_runs_s,
        "goodput": ledger.goodput,
        "ledger_s": ledger.seconds,
        "unaccounted_s": ledger.unaccounted_s,
        "cost": None if money is None else {"spent": money.spent, "productive": money.productive},
    }


def print_json(document: Any) -> None:
    """Print JSON without colors or markup, so that it can be piped."""
    terminal(soft_wrap=True).print(json.dumps(document, indent=2), markup=False, highlight=False)


# `drivetrain report`, `watch` and `compare`.


def report(address: str, output: str) -> int:
    if is_study(address):
        from drivetrain.tune.page import study_page
        from drivetrain.tune.settings import load_study

        _write_page(output, study_page(load_study(Path(address)), time.time()))
        return 0
    from drivetrain.diagnose.run import diagnose
    from drivetrain.view.describe import view_whole
    from drivetrain.view.page import report_page

    run = view_whole(open_run(address), time.time(), diagnose(address))
    _write_page(output, report_page(run, time.time()))
    return 0


def compare(here: str, there: str, output: str | None) -> int:
    """Show both runs; with `output`, also write a page."""
    from drivetrain.view.compare import compare_runs
    from drivetrain.view.describe import view_whole
    from drivetrain.view.terminal.screen import show_comparison

    runs = [view_whole(open_run(address), time.time()) for address in (here, there)]
    found = compare_runs(runs[0], runs[1])
    show_comparison(found, terminal(markup=False))
    if output is not None:
        from drivetrain.view.page import compare_page

        _write_page(output, compare_page(found, time.time()))
    return 0


def watch(address: str, every_s: float, *, once: bool) -> int:
    """Update until q is pressed; print one frame if `once`, or if stdout is not a terminal."""
    if is_study(address):
        return _watch_study(address, every_s, once=once)
    from drivetrain.view.follow import RunFollower
    from drivetrain.view.terminal.screen import watch_live, watch_once

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


def _watch_study(address: str, every_s: float, *, once: bool) -> int:
    from drivetrain.tune.screen import look
    from drivetrain.tune.settings import load_study
    from drivetrain.view.terminal.screen import follow_live

    study, console = load_study(Path(address)), terminal()
    if once or not console.is_terminal:
        console.print(look(study).frame(*console.size))
        return 0
    try:
        follow_live(lambda: look(study).frame, console, every_s)
    except KeyboardInterrupt:
        return 0
    return 0


def plot(address: str, output: str) -> int:
    """Write a page with the charts of a study, without its table of trials."""
    from drivetrain.tune.page import study_page
    from drivetrain.tune.settings import load_study

    study = load_study(Path(address))
    if Path(output).suffix not in (".html", ".htm"):
        rule, remedy = (
            "charts are written as an HTML page",
            "give FILE.html; a browser can print it",
        )
        raise ConfigError([Problem("--output", rule, remedy, output)])
    _write_page(output, study_page(study, time.time(), has_trials=False))
    return 0


def _write_page(output: str, page: str) -> None:
    try:
        write_whole(Path(output), page)
    except OSError as error:
        rule, remedy = error.strerror or str(error), "give a file in a folder you may write to"
        raise ConfigError([Problem("--output", rule, remedy, output)]) from error
    console = terminal(markup=False, soft_wrap=True)
    console.print(f"{output}: {readable_bytes(len(page.encode()))}")


# `drivetrain diagnose`.

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold blue"}


def run_diagnosis(address: str, *, as_json: bool) -> int:
    """Print the findings; return 1 if one of them is an error."""
    from drivetrain.diagnose.run import diagnose

    findings = diagnose(address)
    if as_json:
        say(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        _show(findings, terminal(soft_wrap=False))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _show(findings: list[Finding], console: Console) -> None:
    if not findings:
        console.print("nothing found: no failure, and nothing that costs time")
    for number, finding in enumerate(findings):
        if number:
            console.print()
        head = Text(finding.severity.value, style=_COLOURS[finding.severity])
        head.append(f"  {finding.kind.label}", style="bold")
        if finding.when:
            head.append(f"  ({finding.when})", style="dim")
        console.print(head)
        _print(console, Text(finding.what), 2)
        _print(console, Text(f"→ {finding.remedy}", style="green"), 2)
        for line in finding.evidence:
            _print(console, Text(f"· {line}", style="dim"), 4)


def _print(console: Console, text: Text, indent: int) -> None:
    console.print(Padding(text, (0, 0, 0, indent), expand=False))
