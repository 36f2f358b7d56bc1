"""`drivetrain bench`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drivetrain.bench.faults.recovery import run_recovery
from drivetrain.bench.faults.scale import run_scale
from drivetrain.bench.faults.supervision import run_supervision
from drivetrain.bench.links.slow_link import run_slow_link
from drivetrain.bench.plan.time import run_plan_time
from drivetrain.bench.reading.bench import run_reading
from drivetrain.bench.steps import campaign
from drivetrain.bench.targets.ray import run_ray
from drivetrain.bench.targets.start import run_start
from drivetrain.cli.terminal import terminal
from drivetrain.testing.hosts import make_hosts


def run(name: str, output: str | None, rounds: int, ranks: int) -> None:
    """Measure, then show the table."""
    campaigns: dict[str, Callable[[Path, int, int], str]] = {
        "overhead": campaign.run_overhead,
        "bitwise": campaign.run_bitwise,
        "save": campaign.run_save,
        "axes": campaign.run_axes,
        "sentinel": campaign.run_sentinel,
        "recording": campaign.run_recording,
        "recovery": lambda folder, rounds, _: run_recovery(folder, rounds),
        "supervision": lambda folder, rounds, _: run_supervision(folder, rounds),
        "start": run_start,
        "scale": lambda folder, _, __: run_scale(folder),
        "reading": lambda folder, _, __: run_reading(folder),
        "ray": lambda folder, rounds, _: run_ray(folder, rounds),
        "plan-time": lambda folder, _, __: run_plan_time(folder, make_hosts),
        "slow-link": lambda folder, _, __: run_slow_link(folder, make_hosts),
    }
    folder = Path(output or f"bench-{name}")
    console = terminal(highlight=True)
    table = campaigns[name](folder, rounds, ranks)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    console.print(f"raw samples, table and plot: {folder}/", markup=False, highlight=False)
