"""One replica of a live run: `python -m tests.ranks.live_worker DIR NAME STEPS PAUSE_S HOLDS…`.

A name begins with the replica's letter: a sits before b, and a2 is the second life of a. Each
committed step leaves a line in DIR/NAME.jsonl: the samples this replica trained in it, and when.
The whole history follows at the end. At a step named in HOLDS it says so (DIR/NAME.at.STEP) and
stays in the middle of it until DIR/go.STEP is there.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils.data import DataLoader

from drivetrain.config.load import resolve
from drivetrain.data.sources import source_from
from drivetrain.parallel.world import live_world
from drivetrain.record.recorder import Recorder
from drivetrain.train.assemble import assemble
from drivetrain.train.history import History
from drivetrain.train.live.training import go_live
from drivetrain.train.loop import Loop
from drivetrain.train.saving.run_state import Position
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.watch.logged_steps import LoggedSteps
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.training import NUM_SAMPLES, settings


class Watched(Sentences):
    """Remembers which samples were read."""

    def __init__(self) -> None:
        super().__init__(NUM_SAMPLES)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return super().__getitem__(index)


@dataclass
class Witness:
    """Writes down what was committed, and holds where it is told to."""

    folder: Path
    name: str
    pause_s: float
    holds: set[int]
    file: TextIO
    data: Watched = field(default_factory=Watched)

    def __call__(self, event: str, *arguments: Any) -> None:
        if event == "on_train_batch_start":  # also when a step is done again
            self.data.read.clear()
            time.sleep(self.pause_s)
            if arguments[0] - 1 in self.holds:
                self._hold(arguments[0] - 1)
        if event == "on_train_batch_end":
            self.write(step=arguments[0] - 1, ids=self.data.read, at_s=time.time())

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields) + "\n")

    def _hold(self, step: int) -> None:
        (self.folder / f"{self.name}.at.{step}").touch()
        while not (self.folder / f"go.{step}").exists():
            time.sleep(0.01)


class NoSaver:
    """A replica that dies here has nothing to go on from but the others."""

    ends = False

    def after_step(self, step: int, log: Any) -> None:
        pass

    def take_stall(self) -> float:
        return 0.0

    def finish(self) -> None:
        pass


def main(folder: Path, name: str, steps: int, pause_s: float, holds: set[int]) -> None:
    torch.set_num_threads(1)
    with (folder / f"{name}.jsonl").open("w", buffering=1) as file:
        witness = Witness(folder, name, pause_s, holds, file)
        loader: DataLoader[Any] = DataLoader(witness.data, collate_fn=collate, shuffle=True)
        task, history = gpt_task(), History()
        resolved = resolve(settings(str(folder), max_steps=steps))
        source = source_from(loader, resolved.config.data)
        assembly = assemble(task, resolved, source)
        rank = ord(name[0]) - ord("a")
        identity = replace(assembly.world.identity, rank=rank, world_size=rank + 1)
        assembly.engine.world = live_world(identity)
        with Recorder(folder / f"{name}.events") as recorder:
            loop = Loop(
                task=task,
                engine=assembly.engine,
                feed=assembly.feed,
                recorder=recorder,
                notify=witness,
                logging_steps=10,
                evaluate_every=None,
                evaluate=None,
                report=history.steps.extend,
                logged=LoggedSteps(history, say=print, most_skipped=None, remedy=""),
                saver=NoSaver(),  # type: ignore[arg-type]
                at=Position(),
            )
            assembly.engine.model.train()
            (folder / f"{name}.ready").touch()
            go_live(loop, assembly.source, assembly.config).run(assembly.total_steps, None)
        digest = weights_sha256(assembly.engine.spread.full_state())
        numbers = [metrics.step for metrics in history.steps]
        witness.write(losses=history.losses, numbers=numbers, weights=digest)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        float(sys.argv[4]),
        {int(step) for step in sys.argv[5:]},
    )
