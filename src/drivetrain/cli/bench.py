"""`drivetrain bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from drivetrain.bench import campaign


def run(name: str, output: str | None, rounds: int, ranks: int) -> None:
    """Measure, then show the table."""
    campaigns: dict[str, Callable[[Path, int, int], str]] = {
        "overhead": campaign.run_overhead,
        "bitwise": campaign.run_bitwise,
    }
    folder = Path(output or f"bench-{name}")
    console = Console()
    table = campaigns[name](folder, rounds, ranks)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    console.print(f"raw samples, table and plot: {folder}/", markup=False, highlight=False)
