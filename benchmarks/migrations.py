"""Scripts of other libraries next to the same here: both run, their losses laid side by side.

    python -m benchmarks.migrations benchmarks/results/migrations [NAME …]

Results are one JSON file for each pair; `python -m benchmarks.migrations --pages` writes them, and
the scripts themselves, into docs/migrate/.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "migrate"
RESULTS = ROOT / "benchmarks" / "results" / "migrations"
PAGES = ROOT / "docs" / "migrate"
_BIN = Path(sys.executable).parent
_TORCHRUN = (str(_BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
_DEEPSPEED = (str(_BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", "{port}")
_ALONE = (sys.executable,)
_TWO = (sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Pair:
    """How the two are run."""

    name: str
    library: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    words: tuple[str, ...] = ()

    @property
    def page(self) -> Path:
        """Where it is shown."""
        return PAGES / f"{self.name.replace('_', '-')}.md"


PAIRS = (
    Pair("lightning", "lightning", _ALONE, _ALONE),
    Pair("hf_trainer", "transformers", _ALONE, _ALONE),
    Pair("ddp", "torch", _TORCHRUN, _TWO),
    Pair("accelerate", "accelerate", _TORCHRUN, _TWO),
    Pair("deepspeed", "deepspeed", _DEEPSPEED, _TWO),
    Pair("ray_train", "ray", _ALONE, _TWO),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def losses_of(command: tuple[str, ...], script: Path, words: tuple[str, ...] = ()) -> list[float]:
    """Run it in a folder of its own; the losses it prints."""
    port = free_port()
    variables = {
        **os.environ,
        "PATH": f"{_BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        # DeepSpeed compiles what it needs; a folder that others share may be locked for good.
        "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "torch-extensions"),
        "DS_ACCELERATOR": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as the others
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*(word.format(port=port) for word in command), str(script), *words],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
    finally:  # 69 MB a rank that DeepSpeed leaves in memory
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*_{port}_*"):  # noqa: S108
            left.unlink()
    found = re.findall(r"losses (\[.*\])", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{script}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    losses: list[float] = json.loads(found[-1])
    return losses


def compare(pair: Pair) -> dict[str, Any]:
    """Both, one after the other."""
    folder = SCRIPTS / pair.name
    before = losses_of(pair.before, folder / "before.py")
    after = losses_of(pair.after, folder / "after.py", pair.words)
    if len(before) != len(after):
        raise SystemExit(f"{pair.name}: {len(before)} steps before, {len(after)} after")
    return {
        "library": f"{pair.library} {version(pair.library)}",
        "before": before,
        "after": after,
        "max_difference": max(abs(a - b) for a, b in zip(before, after, strict=True)),
    }


def changed_lines(before: Path, after: Path) -> tuple[int, int]:
    """Lines removed, and lines added; the first says how to run it."""
    old, new = (path.read_text().splitlines()[1:] for path in (before, after))
    marks = [line[0] for line in difflib.ndiff(old, new) if line.strip("+- ")]
    return marks.count("-"), marks.count("+")


def blocks(name: str) -> dict[str, str]:
    """What a page shows of a pair, by the marks it stands between."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [0, 1, 2, *range(8, len(result["before"]), 8), len(result["before"]) - 1]
    lines = [
        f"| {row + 1} | {result['before'][row]:.6f} | {result['after'][row]:.6f} |"
        for row in sorted(set(rows))
    ]
    gone, came = changed_lines(SCRIPTS / name / "before.py", SCRIPTS / name / "after.py")
    source = {
        which: f"```python\n{(SCRIPTS / name / f'{which}.py').read_text()}```"
        for which in ("before", "after", "module")
        if (SCRIPTS / name / f"{which}.py").exists()
    }
    summary = (
        f"Run with {result['library']}: largest difference of {len(result['before'])} losses "
        f"{result['max_difference']:.1e}; {gone} lines removed, {came} added."
    )
    table = "\n".join(["| step | before | after |", "| --- | --- | --- |", *lines])
    return {**source, "losses": f"{summary}\n\n{table}"}


def refreshed(page: str, name: str) -> str:
    """The page with its blocks as they are now."""
    for mark, text in blocks(name).items():
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page = pattern.sub(lambda _, b=begin, t=text, e=end: f"{b}\n{t}\n{e}", page)  # type: ignore[misc]
    return page


def write_pages() -> None:
    for pair in PAIRS:
        if (RESULTS / f"{pair.name}.json").exists() and pair.page.exists():
            pair.page.write_text(refreshed(pair.page.read_text(), pair.name))


def main(argv: list[str]) -> None:
    if argv == ["--pages"]:
        write_pages()
        return
    output, *names = argv
    Path(output).mkdir(parents=True, exist_ok=True)
    for pair in PAIRS:
        if names and pair.name not in names:
            continue
        began_s = time.monotonic()
        result = compare(pair)
        text = json.dumps(result, indent=1)
        (Path(output) / f"{pair.name}.json").write_text(text + "\n")
        took_s = time.monotonic() - began_s
        print(f"{pair.name}: {result['max_difference']:.1e} ({took_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
