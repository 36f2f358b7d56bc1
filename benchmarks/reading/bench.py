"""`python -m benchmarks reading`: what it takes to look at a run of thousands of ranks.

A made-up run is written in a real one's format; then each verb reads it in a process of its own,
timed from its start to its end, with the processor time it used and the most memory it ever held.
Files come from the disk's cache ("warm"), and once after the system was told to forget them
("cold").
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reading.made_run import MadeRun, make_run

_SIZES = ((8, 10_000), (512, 10_000), (4_096, 10_000))
VERBS = {
    "status": ("status", "{run}"),
    "diagnose": ("diagnose", "{run}"),
    "watch": ("watch", "{run}", "--once"),
    "report": ("report", "{run}", "--output", "{page}"),
}
_ROUNDS = 3


def run_reading(output: Path, sizes: Sequence[tuple[int, int]] = _SIZES) -> str:
    """Every verb on runs of every size; the table."""
    output.mkdir(parents=True, exist_ok=True)
    found = []
    for num_ranks, num_steps in sizes:
        with tempfile.TemporaryDirectory(prefix="reading-") as folder:
            run = Path(folder) / "run"
            make_run(run, MadeRun(num_ranks, num_steps, slow_rank=num_ranks // 3))
            found += measure(run, num_ranks, num_steps)
    (output / "samples.json").write_text(json.dumps(found, indent=1) + "\n")
    table = make_table(found)
    (output / "table.md").write_text(table)
    return table


def measure(run: Path, num_ranks: int, num_steps: int) -> list[dict[str, Any]]:
    """Each verb on one run, cold and warm."""
    page = run.with_name("page.html")
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    found = []
    for name, words in VERBS.items():
        command = [word.format(run=run, page=page) for word in words]
        _forget(run)
        cold = timed(command)
        warm = [timed(command) for _ in range(_ROUNDS)]
        found.append(
            {
                "verb": name,
                "ranks": num_ranks,
                "steps": num_steps,
                "run_bytes": size,
                "cold_s": cold["seconds"],
                "warm_s": sorted(each["seconds"] for each in warm)[_ROUNDS // 2],
                "cpu_s": sorted(each["cpu_s"] for each in warm)[_ROUNDS // 2],
                "memory_bytes": max(each["memory_bytes"] for each in (cold, *warm)),
                "page_bytes": page.stat().st_size if name == "report" else None,
            }
        )
    return found


def timed(words: Sequence[str]) -> dict[str, float]:
    """Seconds of a verb, and the most memory it held."""
    command = [sys.executable, "-m", "drivetrain", *words]
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        took_s = time.monotonic() - began_s
        said.seek(0)
        # a diagnosis that found something says so by its exit code
        if child.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(words)}: {said.read().decode(errors='replace')}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"seconds": took_s, "cpu_s": cpu_s, "memory_bytes": usage.ru_maxrss * 1024.0}


def make_table(found: Sequence[dict[str, Any]]) -> str:
    """As a page shows it."""
    lines = [
        "| verb | ranks × steps | run | cold | warm | processor | memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in found:
        seconds = " | ".join(f"{each[name]:.1f} s" for name in ("cold_s", "warm_s", "cpu_s"))
        lines.append(
            f"| {each['verb']} | {each['ranks']:,} × {each['steps']:,} "
            f"| {each['run_bytes'] / 1e6:,.0f} MB | {seconds} "
            f"| {each['memory_bytes'] / 1e6:,.0f} MB |"
        )
    return "\n".join(lines) + "\n"


def _forget(run: Path) -> None:
    """Tell the system that these files need not stay in memory."""
    os.sync()
    for path in run.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
