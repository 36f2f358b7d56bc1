"""Hooks that a drill adds to a run by DRIVETRAIN_HOOKS: a witness, and a rank that hangs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer
from drivetrain.verify.drills.clock import skew_as_told

FOLDER = "DRIVETRAIN_DRILL_FOLDER"
SEEN: list[int] = []
"""Sample ids of this step, from a script that keeps track of them itself."""


class Witness(Hook):
    """Records which samples each finished step used, before the step can be saved."""

    def __init__(self) -> None:
        self._file = -1
        self._attempt = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open this process's own file."""
        skew_as_told()  # for a rank that was not forked
        folder = Path(os.environ[FOLDER]) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.uname().nodename}-{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._attempt = trainer.attempt

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """Write one line immediately: the process may be killed a microsecond later."""
        if trainer.assembly is not None:
            ids = list(SEEN) or trainer.assembly.feed.sample_ids(step - 1)
            SEEN.clear()
            line = json.dumps({"attempt": self._attempt, "step": step, "ids": ids})
            os.write(self._file, f"{line}\n".encode())


class Hang(Hook):
    """Hangs in a step forever, once, if the drill has asked for it."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Hang if the drill has created this process's file."""
        wish = Path(os.environ[FOLDER]) / f"hang-{os.getpid()}"
        if wish.exists():
            wish.unlink()
            while True:
                time.sleep(1)
