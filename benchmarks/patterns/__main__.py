"""`python -m benchmarks.patterns RESULTS [NAME …]`: each pattern before and after.

The original runs on one process. The same under Drivetrain runs on 1 process, on 2 with ddp and
with fsdp, and each of these once more with its last rank killed (SIGKILL) after the middle, and
started again. Same seed, same order of samples. Without names, all patterns. `--page` writes the
tables into docs/migrate/patterns.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.migrations import PAGES, ROOT, changed_lines
from benchmarks.patterns.kinds import PATTERNS, Pattern
from benchmarks.patterns.running import ARMS, moved, original, prepare_processes
from benchmarks.patterns.table import draw, table


def measure(pattern: Pattern, folder: Path) -> dict[str, Any]:
    before = original(pattern.before, folder / "original")
    arms: dict[str, Any] = {}
    for arm in ARMS:
        place = folder / arm.name.replace(", ", "-").replace(" ", "-")
        outcome = moved(arm, pattern.after, place, pattern.kill_at)
        arms[arm.name] = {
            **asdict(outcome.curve),
            "resumed_at": outcome.resumed_at,
            "weights_sha256": outcome.weights_sha256,
        }
    return {
        "shows": pattern.shows,
        "torch": version("torch"),
        "lines": changed_lines(pattern.before, pattern.after),
        "original": asdict(before),
        "arms": arms,
    }


def main(output: Path, names: list[str]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    prepare_processes()
    for pattern in PATTERNS:
        if names and pattern.name not in names:
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = measure(pattern, Path(folder))
        (output / f"{pattern.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{pattern.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    write(output)


def write(output: Path) -> None:
    """The table and the picture of what there is."""
    files = {pattern.name: output / f"{pattern.name}.json" for pattern in PATTERNS}
    results = {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}
    (output / "patterns.md").write_text(table(results))
    draw(results, output / "patterns.png")
    print(table(results))


def refreshed(page: str) -> str:
    """The page with the tables as they are now."""
    for name in ("patterns", "originals"):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}{(RESULTS / f'{name}.md').read_text()}{end}{rest.partition(end)[2]}"
    return page


RESULTS = ROOT / "benchmarks" / "results" / "patterns"
PAGE = PAGES / "patterns.md"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        PAGE.write_text(refreshed(PAGE.read_text()))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
