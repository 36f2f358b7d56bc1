"""The audit after a drill: is the run what it would have been?"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.storage import storage_at
from drivetrain.supervise.failures.rank_dump import kernel_state

StepIds = dict[int, list[int]]


def sample_problems(
    folder: Path, run_dir: Path, expected: StepIds, removed: Sequence[lineage.Claim] = ()
) -> list[str]:
    """Each step of the run that counts must have used exactly the samples it should, once.

    The step that counts is the one of the last attempt that went on from before it: what an earlier
    one did beyond that point was done again, and is not part of the run. `removed` are claims that
    a person has taken away meanwhile.
    """
    claims = [*lineage.read_claims(storage_at(run_dir / "checkpoints")), *removed]
    seen = read_samples(folder)
    problems = []
    for step, ids in expected.items():
        owner = max((c.attempt for c in claims if c.step < step), default=0)
        used = sorted(seen.get((owner, step), []))
        if used != ids:
            problems.append(f"step {step} of attempt {owner} used {used} instead of {ids}")
    return problems[:3]


def read_samples(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(attempt, step) → sample ids over all ranks, as the witnesses wrote them down."""
    seen: dict[tuple[int, int], list[int]] = defaultdict(list)
    for path in (folder / "samples").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            seen[entry["attempt"], entry["step"]] += entry["ids"]
    return seen


def checkpoint_problems(run_dir: Path) -> list[str]:
    """The newest checkpoint must be whole, to the last byte."""
    place = storage_at(run_dir / "checkpoints")
    good = [entry for entry in catalogue.entries(place) if entry.manifest is not None]
    if not good:
        return ["there is no good checkpoint"]
    try:
        catalogue.verify(place, good[0].folder)
    except DamagedCheckpoint as error:
        return [f"{good[0].folder}: {error}"]
    return []


def descendants() -> set[int]:
    """Every living process below this one; it has become the parent of those that lost theirs."""
    parents: dict[int, list[int]] = defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        found = kernel_state(int(entry))
        if found is not None and found[0] != "Z":
            parents[found[1]].append(int(entry))
    below, queue = set(), [os.getpid()]
    while queue:
        children = parents[queue.pop()]
        below |= set(children)
        queue += children
    return below


def orphans(expected: set[int], patience_s: float = 2.0) -> list[str]:
    """Processes of the drill that are still there."""
    deadline_s = time.monotonic() + patience_s
    while (left := descendants() - expected) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return [f"process {pid} is left" for pid in sorted(left)]


def weights_fingerprint(run_dir: Path) -> str:
    """Of the trained weights, every bit."""
    import torch

    from drivetrain.train.saving.weights import weights_sha256

    return weights_sha256(torch.load(run_dir / "checkpoints" / "weights.pt", weights_only=True))
