"""`drivetrain diagnose`."""

from __future__ import annotations

import json

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from drivetrain.cli.say import say
from drivetrain.cli.terminal import terminal
from drivetrain.diagnose.finding import Finding, Severity
from drivetrain.diagnose.run import diagnose

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold blue"}


def run(address: str, *, as_json: bool) -> int:
    """Print the findings; 1 when one of them is an error."""
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
        head.append(f"  {finding.kind.value.replace('_', ' ')}", style="bold")
        if finding.attempt is not None:
            head.append(f"  (attempt {finding.attempt})", style="dim")
        console.print(head)
        _print(console, Text(finding.what), 2)
        _print(console, Text(f"→ {finding.remedy}", style="green"), 2)
        for line in finding.evidence:
            _print(console, Text(f"· {line}", style="dim"), 4)


def _print(console: Console, text: Text, indent: int) -> None:
    console.print(Padding(text, (0, 0, 0, indent), expand=False))
