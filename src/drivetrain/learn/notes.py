"""What a lab's script records about each step, and how the check reads it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Note:
    """One step, as one rank saw it."""

    step: int
    rank: int
    num_ranks: int
    loss: float
    """Loss of this rank's part of the batch, before the step."""
    weights: str
    """Fingerprint of the model after the step."""
    host: str
    pid: int
    time_s: float


def note(
    folder: str | Path, step: int, rank: int, num_ranks: int, loss: float, model: nn.Module
) -> None:
    """Append one line to this process's own file at once: it may be killed a moment later."""
    place = Path(folder) / "notes"
    place.mkdir(parents=True, exist_ok=True)
    host, pid = os.uname().nodename, os.getpid()
    said = Note(step, rank, num_ranks, float(loss), fingerprint(model), host, pid, time.time())
    with (place / f"{host}-{pid}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(said)) + "\n")


def fingerprint(model: nn.Module) -> str:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def read_notes(folder: Path) -> list[Note]:
    """Return the notes in the order in which they were written, without truncated lines."""
    found = []
    for path in (folder / "notes").glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(Note(**json.loads(line)))
    return sorted(found, key=lambda each: each.time_s)


Attempt = dict[int, list[Note]]
"""Each rank's steps, in order."""


def attempts_of(notes: Sequence[Note]) -> list[Attempt]:
    """Split notes into attempts: a new process, or a step that is not later, begins a new one."""
    attempts: list[Attempt] = []
    for rank in sorted({each.rank for each in notes}):
        number, before = -1, None
        for each in notes:
            if each.rank != rank:
                continue
            if before is None or each.pid != before.pid or each.step <= before.step:
                number += 1
            while len(attempts) <= number:
                attempts.append({})
            attempts[number].setdefault(rank, []).append(each)
            before = each
    return attempts
