"""`drivetrain config`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from drivetrain.cli.terminal import terminal
from drivetrain.config import load_config
from drivetrain.config.keys import walk_fields


def run(file: str | None, argv: Sequence[str]) -> None:
    """Without arguments the keys; with some, the config they make."""
    console = terminal(highlight=True)
    if file is not None or argv:
        console.print(load_config(file, argv=argv).to_yaml(), markup=False, highlight=False, end="")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("what it is")
    for path, field in walk_fields():
        default = "(required)" if field.is_required() else _shown(field.default)
        table.add_row(path, default, " ".join((field.description or "").split()))
    console.print(table)


def _shown(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, tuple):
        return "[" + ", ".join(default) + "]"
    return str(default).lower() if isinstance(default, bool) else str(default)
