"""One life of a run that writes down which samples each step has used; `run_ranks` starts it."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import drivetrain
from drivetrain.core.errors import WorkerFailure
from drivetrain.record import session
from drivetrain.testing import run_ranks

NUM_EPOCHS, SAVED_EVERY, KILLED_AT = 2, 3, 8


def ids_in(batch: Any) -> list[int]:
    found = batch["id"] if isinstance(batch, dict) else batch
    return [int(number) for number in found]


def train(make: Any, run: str, config: dict[str, Any], killed_at: int | None = None) -> None:
    """Train on what `make()` returns, and kill this process with the step that says so."""
    warnings.simplefilter("ignore")
    os.environ[session.RUN_DIR] = run
    session._opened = 0
    settings = {
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "num_train_epochs": NUM_EPOCHS,
        "optimization": {"learning_rate": 1e-5, "lr_scheduler_type": "constant"},
        "checkpoint": {"every_steps": SAVED_EVERY, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
        **config,
    }
    loop = drivetrain.prepare(lambda: nn.Linear(1, 1), None, make(), settings)
    Path(run).mkdir(parents=True, exist_ok=True)
    log = Path(run, f"used-{loop.assembly.world.rank}-{os.getpid()}.jsonl")
    log.touch()
    for step in loop.steps():
        number = loop._at.step
        used: list[list[int]] = []
        epoch = 0
        for batch in step:
            micro = loop._micro
            assert micro is not None
            epoch = micro.epoch
            ids = ids_in(batch)
            if micro.num_samples:
                assert len(ids) == micro.num_samples
                used.append([micro.index, *ids])
            loop.backward(loop.model(torch.tensor(ids)[:, None] / 100).pow(2).mean())
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loop.step()
        with log.open("a") as lines:
            print(json.dumps([number, epoch, used]), file=lines)


Step = tuple[int, list[list[int]]]
"""Its epoch, and the samples of each of its micro-batches, by index."""


def used_in(run: str, lives: list[list[str]]) -> dict[int, Step]:
    """By step. A step that was done again counts once: its first time was never saved."""
    steps: dict[int, Step] = {}
    for names in lives:
        found: dict[int, Step] = {}
        for name in names:
            for line in Path(run, name).read_text().splitlines():
                number, epoch, used = json.loads(line)
                found.setdefault(number, (epoch, []))[1].extend(used)
        first = min(found, default=0)
        steps = {number: step for number, step in steps.items() if number < first} | found
    return {number: (epoch, sorted(used)) for number, (epoch, used) in sorted(steps.items())}


def live(
    body: Any, args: tuple[Any, ...], run: str, ranks: int, killed_at: int | None
) -> tuple[list[str], str]:
    """The files one life has written, and why it was refused, if it was."""
    before = set(os.listdir(run)) if os.path.isdir(run) else set()
    problem = ""
    try:
        run_ranks(body, ranks, args=(*args, run, killed_at))
    except WorkerFailure as error:
        text = str(error)
        if "ConfigError" in text:
            problem = text.rpartition("ConfigError:")[2].strip()
        elif "signal 9" not in text or killed_at is None:
            raise
    after = set(os.listdir(run)) if os.path.isdir(run) else set()
    return sorted(name for name in after - before if name.startswith("used-")), problem


def verdict(steps: dict[int, Step], num_samples: int) -> str:
    """Whether every sample was used once in each epoch."""
    for epoch in range(NUM_EPOCHS):
        counts = Counter(
            number
            for step_epoch, used in steps.values()
            if step_epoch == epoch
            for _, *ids in used
            for number in ids
        )
        missing = num_samples - len(counts)
        twice = sum(count > 1 for count in counts.values())
        if missing or twice:
            return f"WRONG: epoch {epoch}: {missing} not used, {twice} used twice"
    return "exact"
