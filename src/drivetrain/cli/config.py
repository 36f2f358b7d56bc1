"""`drivetrain config`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic.fields import FieldInfo
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drivetrain.cli.terminal import terminal
from drivetrain.config import load_config
from drivetrain.config.keys import walk_fields

# Terminal columns: a narrower table would leave no room for its last column.
_WIDE = 140


def run(file: str | None, argv: Sequence[str]) -> None:
    """List the keys; with a file or arguments, show the resolved config."""
    console = terminal(highlight=True)
    if file is not None or argv:
        console.print(load_config(file, argv=argv).to_yaml(), markup=False, highlight=False, end="")
        return
    if console.width < _WIDE:
        for path, field in walk_fields():
            console.print(Text(f"{path} = {_default(field)}", style="bold"))
            console.print(Padding(Text(_what(field)), (0, 0, 0, 4)))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("description")
    for path, field in walk_fields():
        table.add_row(path, _default(field), _what(field))
    console.print(table)


def _default(field: FieldInfo) -> str:
    return "(required)" if field.is_required() else _shown(field.default)


def _what(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _shown(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, tuple):
        return "[" + ", ".join(default) + "]"
    return str(default).lower() if isinstance(default, bool) else str(default)
