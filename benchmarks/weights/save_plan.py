"""`python -m benchmarks save-plan`: a save's plan at thousands of ranks, in any one process.

There are no thousands of processes here: each part that a process of such a run computes is run in
one of its own, on what it would be sent, with the run's own functions. Its seconds and its peak
memory (VmHWM, less what a process has that only imports) are what that process would take; the time
on the wire is not in it, the bytes are. Beside it, torch's own plan on rank 0, at sizes that fit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from drivetrain.checkpoint import tensor_index
from drivetrain.checkpoint.sharing import Held, answers, homes_of, keys_of, own_share
from drivetrain.checkpoint.tensor_index import Piece

RANKS, TENSORS = 4096, 1000
MOST_S, MOST_BYTES = 10.0, 10**9
_ROWS, _COLUMNS = 4, 4096
_COMPARED = (64, 256)


def run_save_plan(output: Path) -> str:
    """Each part in a process of its own; the table."""
    output.mkdir(parents=True, exist_ok=True)
    sizes = [(part, RANKS) for part in _PARTS if part != "torch"]
    sizes += [("torch", ranks) for ranks in _COMPARED]
    found = [{"part": part, "ranks": ranks, **_measure(part, ranks)} for part, ranks in sizes]
    document = {"ranks": RANKS, "tensors": TENSORS, "parts": found}
    (output / "samples.json").write_text(json.dumps(document, indent=1) + "\n")
    table = make_table(document)
    (output / "table.md").write_text(table)
    return table


def _measure(part: str, ranks: int) -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.weights.save_plan", part, str(ranks)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def _pieces(rank: int, *, is_copied: bool = False) -> list[Held]:
    at = 0 if is_copied else rank * _ROWS
    size = _ROWS * _COLUMNS * 4
    return [Held(f"model.layers.{n}.weight", (at, 0), size) for n in range(TENSORS)]


def _rank_of_shards(ranks: int) -> Iterator[int]:
    """Every rank has shards of its own: it asks, is answered, and has its plan."""
    held = _pieces(1)
    yield 0
    keys = keys_of(held)
    homes_of(keys, ranks)
    said = np.tile(np.array([0, 1, 0]), (len(held), 1))
    own_share(held, keys, said)
    yield keys.nbytes + said.nbytes


def _rank_of_copies(ranks: int) -> Iterator[int]:
    """Every rank has the same: all of them divide it."""
    held = _pieces(1, is_copied=True)
    yield 0
    keys = keys_of(held)
    homes_of(keys, ranks)
    said = np.tile(np.array([1, ranks, 7]), (len(held), 1))
    own_share(held, keys, said)
    yield keys.nbytes + said.nbytes


def _home_of_copies(ranks: int) -> Iterator[int]:
    """The home of as many of the pieces that all hold as the unluckiest has."""
    keys = keys_of(_pieces(0, is_copied=True))
    homes = homes_of(keys, ranks)
    busiest = np.bincount(homes).argmax()
    own = keys[homes == busiest]
    yield 0
    asked = np.tile(own, (ranks, 1))
    said = answers(asked, np.repeat(np.arange(ranks), len(own)))
    yield asked.nbytes + said.nbytes


def _index(ranks: int) -> Iterator[int]:
    """Rank 0 hears what each has written, and writes the index, every save."""
    pieces = {}
    entries: dict[str, Any] = {}
    shape = torch.Size([ranks * _ROWS, _COLUMNS])
    for n, held in enumerate(_pieces(0)):
        offsets = torch.Size(held.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size([_ROWS, _COLUMNS]))
        properties = TensorProperties(dtype=torch.float32)
        entries[held.name] = TensorStorageMetadata(properties, shape, [chunk])
        at = n * held.num_bytes
        pieces[MetadataIndex(held.name, offsets)] = Piece("data-00000.bin", at, at, "0badcafe")
    line = tensor_index.to_json(Metadata(entries), pieces)
    yield 0
    with tempfile.TemporaryFile() as file:
        lines = (line.replace(b"data-00000", b"data-%05d" % rank) for rank in range(ranks))
        size, _ = tensor_index.write_lines(lines, file)
    yield size


def _torch(ranks: int) -> Iterator[int]:
    """DefaultSavePlanner's global plan, as rank 0 makes it, from plans that have arrived."""
    plans = []
    for rank in range(ranks):
        items = []
        for held in _pieces(rank):
            offsets = torch.Size(held.offsets)
            chunk = ChunkStorageMetadata(offsets, torch.Size([_ROWS, _COLUMNS]))
            whole = torch.Size([ranks * _ROWS, _COLUMNS])
            data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), whole)
            index = MetadataIndex(held.name, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    yield 0
    planner.create_global_plan(plans)
    yield 0


_PARTS: dict[str, Callable[[int], Iterator[int]]] = {
    "a rank's own plan, shards": _rank_of_shards,
    "a rank's own plan, copies": _rank_of_copies,
    "the busiest home, copies": _home_of_copies,
    "rank 0, the index": _index,
    "torch": _torch,
}


def make_table(document: dict[str, Any]) -> str:
    """Each part beside what is allowed."""
    lines = [
        f"{document['ranks']:,} ranks × {document['tensors']:,} tensors. Allowed in any one "
        f"process: {MOST_S:.0f} s and {MOST_BYTES / 1e9:.0f} GB.",
        "",
        "| process | ranks | seconds | of them on a core | memory | sent or written |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in document["parts"]:
        name = "torch's plan, rank 0" if each["part"] == "torch" else each["part"]
        moved = f"{each['moved_bytes'] / 1e6:,.1f} MB" if each["moved_bytes"] else "not counted"
        cells = [name, f"{each['ranks']:,}", f"{each['seconds']:.3f}", f"{each['cpu_s']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{each['bytes'] / 1e6:,.0f} MB", moved]) + " |")
    return "\n".join(lines) + "\n"


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    before = _peak()
    part = _PARTS[sys.argv[1]](int(sys.argv[2]))
    next(part)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    moved = next(part)
    cpu_s, took_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
    memory = _peak() - before
    facts = {"seconds": took_s, "cpu_s": cpu_s, "bytes": memory, "moved_bytes": moved}
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
