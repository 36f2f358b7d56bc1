"""`python -m benchmarks first-weights`: memory and bytes of a start that no rank makes whole.

A Llama-shaped model of 607 million parameters (fp32, AdamW) on four ranks with fsdp: from nothing,
and from a folder of safetensors in bf16. Each rank is a process of its own that stops at marked
places; its peak (VmHWM) and the bytes it has read (/proc/…/io) are taken from outside.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.weights.model import PARTS, num_bytes, save_files
from benchmarks.weights.ranks import start_ranks

_WAYS = {
    "from nothing, keyed": {"initialization": "keyed"},
    "from nothing, sequential": {"initialization": "sequential"},
    "pretrained": {"pretrained": "FILES"},
}
_GIVE_UP_S = 1800.0
_SLACK_BYTES = 600e6


def run_first_weights(output: Path, num_ranks: int = 4) -> str:
    """Each way once; the table."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        save_files(Path(folder) / "files")
        found = {way: _run(Path(folder), said, num_ranks) for way, said in _WAYS.items()}
    document = {"num_ranks": num_ranks, "bytes": num_bytes(), "parts": PARTS, "ways": found}
    (output / "samples.json").write_text(json.dumps(document, indent=1) + "\n")
    table = make_table(document)
    (output / "table.md").write_text(table)
    return table


def _run(folder: Path, said: dict[str, str], num_ranks: int) -> list[dict[str, Any]]:
    model = {key: value.replace("FILES", str(folder / "files")) for key, value in said.items()}
    config = {"model": model, "checkpoint": {"every_steps": None}, "max_steps": 3}
    ranks = start_ranks(folder, config, num_ranks, env={})
    try:
        return _follow(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _follow(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """At each mark all ranks are looked at, and only then go on."""
    found: list[dict[str, Any]] = [{} for _ in ranks]
    began_s = time.monotonic()
    for mark in ("ready", "made", "step 1", "step 2"):
        for process in ranks:
            while (line := process.stdout.readline().strip()) != f"mark: {mark}":  # type: ignore[union-attr]
                if process.poll() is not None or time.monotonic() - began_s > _GIVE_UP_S:
                    raise RuntimeError(f"a rank ended before {mark}: {line}")
        for seen, process in zip(found, ranks, strict=True):
            seen[mark] = {**_look(process.pid), "seconds": time.monotonic() - began_s}
        for process in ranks:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
    return found


def _look(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    io = Path(f"/proc/{pid}/io").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    read = next(line for line in io if line.startswith("rchar"))
    return {"peak_bytes": int(peak.split()[1]) * 1024, "read_bytes": int(read.split()[1])}


def make_table(document: dict[str, Any]) -> str:
    """The worst rank of each way, beside what is allowed."""
    sizes, ranks = document["bytes"], document["num_ranks"]
    shards = 4 * sizes["weights"] / ranks
    allowed = shards + sizes["largest_unit"] + _SLACK_BYTES
    lines = [
        f"{sizes['weights'] / 4e6:,.0f} million parameters in fp32 with AdamW, fsdp on {ranks} "
        f"ranks. A rank's shards (weights, gradients, optimizer) are {_mb(shards)}, the largest "
        f"unit that is gathered is {_mb(sizes['largest_unit'])}; allowed are both and 600 MB: "
        f"{_mb(allowed)}. A whole copy would be {_mb(sizes['weights'])} of weights alone.",
        "",
        "| start | peak before | peak when made | peak after two steps | read while made | its "
        "shards of the files | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way, found in document["ways"].items():
        peaks = [max(rank[mark]["peak_bytes"] for rank in found) for mark in _MARKS]
        read = max(r["made"]["read_bytes"] - r["ready"]["read_bytes"] for r in found)
        took = max(r["made"]["seconds"] - r["ready"]["seconds"] for r in found)
        stored = _mb(sizes["files"] / ranks) if way == "pretrained" else "none"
        cells = [way, *map(_mb, peaks), _mb(read), stored, f"{took:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_MARKS = ("ready", "made", "step 2")


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
