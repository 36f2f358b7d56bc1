"""Two runs as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from drivetrain.view.compare import Comparison, Row


def show_comparison(comparison: Comparison, console: Console) -> None:
    """What came of it first, what was asked differently after it."""
    for title, rows, nothing in (
        ("what came of it", comparison.outcome, ""),
        ("last values", comparison.metrics, "neither has recorded a scalar"),
        ("where the time went", comparison.ledger, "one of them has no ledger yet"),
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
