"""Origin: the checkpoint a run goes on from, and the claim that makes it this attempt's."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.place import place_at
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.world import World
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import RUN_DIR
from drivetrain.train.saving.run_state import RunState


class Origin:
    """`manifest` is that of the checkpoint; None: the run begins at its beginning."""

    def __init__(
        self, checkpointer: Checkpointer, rule: Checkpoint, directory: RunDirectory, run: RunState
    ) -> None:
        self.manifest: Manifest | None = None
        self._checkpointer = checkpointer
        self._rule = rule
        self._directory = directory
        self._run = run
        self._state = run.whole()
        self._is_another_run = False
        self.note = ""
        """What should be said about where the run begins."""

    def load(self, world: World) -> None:
        """Go on from the newest good checkpoint, if there is one."""
        self._refuse_anothers(world)
        self.manifest = self._checkpointer.load_newest(self._state)
        resume_from = self._rule.resume_from
        if self.manifest is not None or resume_from is None:
            return
        if resume_from == self._rule.directory:  # its own: a job that is started again and again
            self.note = f"nothing is saved in {resume_from} yet: beginning at step 0"
        else:
            self.manifest = self._load_from(resume_from)
            self._is_another_run = True

    def claim(self) -> int:
        """Own the run, from what was loaded; unless an attempt that still lived has dropped it."""
        while True:
            number = self._directory.next_attempt()
            attempt = self._checkpointer.claim(self._run.at.step, number)
            if self.manifest is None or self._is_another_run:
                return attempt
            if self._checkpointer.still_there(self.manifest.folder):
                return attempt
            self.manifest = self._checkpointer.load_newest(self._state)

    def _refuse_anothers(self, world: World) -> None:
        """A run that has only just begun would go on from, and write among, others'."""
        place = self._rule.directory
        if place is None or RUN_DIR in os.environ or self._rule.resume_from == place:
            return
        is_new = world.is_main and self._directory.next_attempt() == 1
        if world.agree("x" if is_new and self._checkpointer.good() else ""):
            remedy = (
                "go on with that run (--run-dir, or checkpoint.resume_from), or give "
                "another directory"
            )
            rule = "holds checkpoints of another run"
            raise ConfigError([Problem("checkpoint.directory", rule, remedy, place)])

    def _load_from(self, address: str) -> Manifest:
        """Another run's newest checkpoint: its directory, or that of its checkpoints."""
        for root in (address, f"{address.rstrip('/')}/checkpoints"):
            manifest = self._checkpointer.elsewhere(place_at(root)).load_newest(self._state)
            if manifest is not None:
                return manifest
        raise ConfigError(
            [
                Problem(
                    "checkpoint.resume_from",
                    "there is no good checkpoint",
                    "give a run's directory, or its checkpoints'; `drivetrain checkpoint ls` lists",
                    str(Path(address)) if "://" not in address else address,
                )
            ]
        )
