"""`python -m benchmarks large-model`: a rank's memory through a whole life of a sharded run.

The Llama-shaped model of `model.py` (607 million parameters in fp32, AdamW) on four ranks with
fsdp: made or read, two steps, a save, SIGKILL in the third, a resume, the last step and the
final files. Each rank is looked at from outside: its peak of resident memory in each phase (VmHWM,
set back by clear_refs), less what it shares with the other processes (Rss - Pss of smaps_rollup).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.weights.model import num_bytes, save_files
from benchmarks.weights.ranks import start_ranks
from drivetrain.record.session import RUN_DIR

_UNITS = {"shard_modules": ["LlamaDecoderLayer", "model.embed_tokens", "lm_head"]}
_WAYS: dict[str, dict[str, Any]] = {
    "from nothing": {"model": {"initialization": "keyed"}},
    "pretrained": {"model": {"pretrained": "FILES"}},
    "from nothing, embedding and head apart": {
        "model": {"initialization": "keyed"},
        "parallel": {"strategy": "fsdp", "fsdp": _UNITS},
    },
}
_SLACK_BYTES = 600e6
_LEFT_BYTES = 1.2e9
"""The host's other processes are not to be hurt."""
_EVERY_S = 0.25
_GIVE_UP_S = 3600.0
_PHASES = {
    "made": "made",
    "step 2": "two steps",
    "saved": "a save",
    "resumed": "resumed",
    "end": "last step, save, files",
}
_SAVES = ("saved", "end")


class _Rank:
    """One rank's process, and what was seen of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: dict[str, dict[str, float]] = {}
        self.mark = ""
        self._shared: list[int] = []
        self._peak = 0
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]

    def look(self) -> None:
        """Its memory now; nothing once it is gone."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            folder = Path(f"/proc/{self.process.pid}")
            facts = _numbers(folder / "smaps_rollup")
            self._shared.append(facts["Rss"] - facts["Pss"])
            self._peak = max(self._peak, _numbers(folder / "status")["VmHWM"])

    def hear(self) -> None:
        """Up to the next mark."""
        for line in self.process.stdout or ():
            if line.startswith("mark: "):
                self.mark = line.removeprefix("mark: ").strip()

    def close_phase(self, name: str) -> None:
        """What was seen since the last one."""
        self.look()
        io = Path(f"/proc/{self.process.pid}/io")
        read = _numbers(io, 1)["rchar"] if io.exists() else 0
        shared = min(self._shared, default=0)
        self.seen[name] = {"peak": self._peak, "shared": shared, "read": read}
        self._peak, self._shared = 0, []
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def go_on(self) -> None:
        self.mark = ""
        if self.process.stdin is not None:
            self.process.stdin.write("\n")
            self.process.stdin.flush()


def _numbers(path: Path, factor: int = 1024) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.split() and value.split()[0].isdecimal():
            found[name] = int(value.split()[0]) * factor
    return found


def run_life(output: Path, num_ranks: int = 4) -> str:
    """Each way once; the table."""
    output.mkdir(parents=True, exist_ok=True)
    chosen = os.environ.get("WAYS", ";".join(_WAYS)).split(";")
    old = output / "samples.json"
    ways = json.loads(old.read_text())["ways"] if old.exists() else {}
    with tempfile.TemporaryDirectory(prefix="large-model-") as name:
        folder = Path(name)
        if "pretrained" in chosen:
            save_files(folder / "files")
        for way in chosen:
            text = json.dumps(_WAYS[way]).replace("FILES", str(folder / "files"))
            ways[way] = _life(folder, json.loads(text), num_ranks)
            shutil.rmtree(folder / "run")
            document = {"num_ranks": num_ranks, "bytes": num_bytes(), "ways": ways}
            old.write_text(json.dumps(document, indent=1) + "\n")
    table = make_table(document)
    (output / "table.md").write_text(table)
    return table


def _life(folder: Path, way: dict[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    manifest = folder / "run" / "checkpoints" / "step-000000002-a1" / "manifest.json"
    first = _start(folder, way, num_ranks)
    try:
        _until("ready", first, "imported")
        _until("made", first)
        _until("step 1", first, "")
        _until("step 2", first)
        _watch(first, manifest.exists, "the save")
        for rank in first:
            rank.close_phase("saved")
            rank.process.send_signal(signal.SIGKILL)
    finally:
        _end(first)
    second = _start(folder, way, num_ranks)
    try:
        _until("ready", second, "imported again")
        _until("made", second, "")
        _until("step 3", second, "resumed")
        _watch(second, lambda: all(each.process.poll() is not None for each in second), "the end")
        for rank in second:
            rank.close_phase("end")
    finally:
        _end(second)
    if any(each.process.returncode for each in second):
        raise RuntimeError("a resumed rank failed")
    index = folder / "run" / "checkpoints" / "weights" / "model.safetensors.index.json"
    total = json.loads(index.read_text())["metadata"]["total_size"]
    if total != num_bytes()["weights"]:
        raise RuntimeError(f"the final files have {total} bytes")
    return [{**one.seen, **two.seen} for one, two in zip(first, second, strict=True)]


def _start(folder: Path, way: dict[str, Any], num_ranks: int) -> list[_Rank]:
    # between two steps: beside one, four ranks' copies and gradients are more than 24 GB hold
    saves = {"every_steps": 2, "asynchronous": False}
    config = {**way, "checkpoint": saves, "max_steps": 3}
    env = {RUN_DIR: str(folder / "run")}
    return [_Rank(process) for process in start_ranks(folder, config, num_ranks, env)]


def _until(mark: str, ranks: list[_Rank], phase: str | None = None) -> None:
    """All ranks are there; they are looked at, and go on."""
    _watch(ranks, lambda: all(rank.mark == mark for rank in ranks), mark)
    for rank in ranks:
        if name := mark if phase is None else phase:
            rank.close_phase(name)
    for rank in ranks:
        rank.go_on()


def _watch(ranks: list[_Rank], is_over: Any, what: str) -> None:
    began_s = time.monotonic()
    while not is_over():
        time.sleep(_EVERY_S)
        for rank in ranks:
            rank.look()
            rank.hear()
        failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
        if failed or time.monotonic() - began_s > _GIVE_UP_S:
            raise RuntimeError(f"a rank ended before {what}")
        if _numbers(Path("/proc/meminfo"))["MemAvailable"] < _LEFT_BYTES:
            raise RuntimeError(f"the host's memory does not suffice for {what}")


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
        rank.process.wait()


def make_table(document: dict[str, Any]) -> str:
    """The worst rank of each phase, beside what is allowed."""
    sizes, ranks = document["bytes"], document["num_ranks"]
    shards = 4 * sizes["weights"] / ranks
    allowed = shards + sizes["largest_unit"] + _SLACK_BYTES
    copy = 3 * sizes["weights"] / ranks
    lines = [
        f"{sizes['weights'] / 4e6:,.0f} million parameters in fp32 with AdamW, fsdp on {ranks} "
        f"ranks: a rank's shards (weights, gradients, optimizer) are {_mb(shards)}. Allowed are "
        f"they, the largest unit that is gathered ({_mb(sizes['largest_unit'])}) and 600 MB: "
        f"{_mb(allowed)}; while a save is under way, its copy ({_mb(copy)}) too: "
        f"{_mb(allowed + copy)}. Worst rank of each phase.",
        "",
        "| start | phase | peak (VmHWM) | shared with others | peak less that | allowed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, found in document["ways"].items():
        for key, phase in _PHASES.items():
            seen = max((rank[key] for rank in found), key=lambda each: each["peak"])
            own = seen["peak"] - seen["shared"]
            most = allowed + (copy if key in _SAVES else 0)
            cells = [way, phase, *map(_mb, (seen["peak"], seen["shared"], own, most))]
            lines.append("| " + " | ".join(cells) + " |")
    if "pretrained" in document["ways"]:
        found = document["ways"]["pretrained"]
        read = max(rank["made"]["read"] - rank["imported"]["read"] for rank in found)
        of_files = sizes["files"] / ranks
        lines += [
            "",
            f"Read while it is made from the pretrained files: {_mb(read)} by the rank that reads "
            f"most; its shards of them are {_mb(of_files)} ({read / of_files:.3f} of them).",
        ]
    return "\n".join(lines) + "\n"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
