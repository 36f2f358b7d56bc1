"""Origin: the checkpoint that a run resumes from, and this attempt's claim to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.contract import Change, ContractChanged
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest, parse_folder
from drivetrain.checkpoint.storage import storage_at
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.world import LiveWorld, World
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import RUN_DIR
from drivetrain.train.assemble import Assembly
from drivetrain.train.contract import agree_on, contract_of
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.saving.run_state import RunState

_SETS_THE_RATE = ("optimiz", "scheduler", "max_steps", "num_train_epochs")
"""Prefixes of the keys that change an optimizer's groups."""


@dataclass(frozen=True)
class Start:
    """How an attempt begins."""

    attempt: int
    """Number of the attempt, counted from 1."""
    checkpointer: Checkpointer
    manifest: Manifest | None
    """Manifest of the loaded checkpoint; None: the run starts at step 0."""
    note: str
    """A line to show about the start."""


def start_from_newest(
    assembly: Assembly, history: History, run: RunState, directory: RunDirectory
) -> Start:
    """Load the newest good checkpoint, if there is one, and claim the run. Collective."""
    config, world = assembly.config, assembly.world
    averages = assembly.engine.averages
    made = {**assembly.made, "ema.decay": "none" if averages is None else averages.decay}
    contract = contract_of(config, assembly.source, made, world)
    agree_on(contract, world)
    rule = config.checkpoint
    storage = storage_at(rule.directory or str(directory.checkpoints))
    checkpointer = Checkpointer(storage, rule, world, config.parallel.strategy, contract)
    origin = Origin(checkpointer, rule, directory, run)
    origin.scales_with_batch = config.optimization.learning_rate_scaling != "none"
    origin.load(world)
    if origin.manifest is None and assembly.unread is not None:
        raise assembly.unread
    # a changed batch size changes the number of steps
    assembly.engine.ends_at(assembly.total_steps)
    for result in history.evaluations:
        note_score(checkpointer, rule, result)
    if isinstance(world, LiveWorld):  # the replica that writes claims it, at its first save
        return Start(directory.next_attempt(), checkpointer, origin.manifest, origin.note)
    attempt = origin.claim()
    if world.is_main:
        checkpointer.clean()
    return Start(attempt, checkpointer, origin.manifest, origin.note)


def note_score(checkpointer: Checkpointer, rule: Checkpoint, result: EvaluationResult) -> None:
    """Remember the metric that `keep_best` uses."""
    if rule.keep_best is not None and rule.keep_best in result.metrics:
        checkpointer.scores[result.step] = result.metrics[rule.keep_best]


class Origin:
    """Loads and claims a checkpoint; `manifest` is None if the run starts at step 0."""

    def __init__(
        self, checkpointer: Checkpointer, rule: Checkpoint, directory: RunDirectory, run: RunState
    ) -> None:
        self.manifest: Manifest | None = None
        self.scales_with_batch = False
        """Whether the learning rate is scaled with the global batch size."""
        self._checkpointer = checkpointer
        self._rule = rule
        self._directory = directory
        self._run = run
        self._state = run.whole()
        self._is_another_run = False
        self.note = ""
        """A line to show about where the run starts."""

    def load(self, world: World) -> None:
        """Load the newest good checkpoint, if there is one."""
        self._refuse_anothers(world)
        try:
            self.manifest = self._load_newest(self._checkpointer)
            if self.manifest is None and self._rule.resume_from is not None:
                self._begin_with(self._rule.resume_from)
        except ContractChanged as error:
            self._note(world, error.folder, error.changes)
            raise
        if self.manifest is not None:
            self._note(world, self.manifest.folder, self._checkpointer.changes)

    def _begin_with(self, address: str) -> None:
        if address == self._rule.directory:  # its own directory: a job that is restarted repeatedly
            self.note = f"no checkpoint in {address} yet: starting at step 0"
        else:
            self.manifest = self._load_from(address)
            self._is_another_run = True
            self._run.at.stopped = ""  # that was the other run's end

    def claim(self) -> int:
        """Claim the run from the loaded checkpoint; reload if a live attempt has deleted it."""
        while True:
            number = self._directory.next_attempt()
            attempt = self._checkpointer.claim(self._run.at.step, number)
            if self.manifest is None or self._is_another_run:
                return attempt
            if self._checkpointer.still_there(self.manifest.folder):
                return attempt
            self.manifest = self._load_newest(self._checkpointer)

    def _load_newest(self, checkpointer: Checkpointer) -> Manifest | None:
        manifest = checkpointer.load_newest(self._state)
        self._take_changes(checkpointer)
        return manifest

    def _take_changes(self, checkpointer: Checkpointer) -> None:
        keys = [change.key for change in checkpointer.changes if change.outcome == "accepted"]
        if any(key.startswith(_SETS_THE_RATE) for key in keys):
            self._run.begin_schedule_anew()  # accepted: use the new settings
        elif "global_batch_size" in keys and self.scales_with_batch:
            self._run.take_own_settings({"lr"})

    def _note(self, world: World, folder: str, changes: Sequence[Change]) -> None:
        if world.is_main and changes:
            self._directory.note_changes(folder, map(asdict, changes))

    def _refuse_anothers(self, world: World) -> None:
        """ConfigError for a new run whose directory holds another run's checkpoints."""
        directory = self._rule.directory
        if directory is None or RUN_DIR in os.environ or self._rule.resume_from == directory:
            return
        self._checkpointer.check_claims()  # rank 0 alone is about to read them
        is_new = world.is_main and self._directory.next_attempt() == 1
        if world.agree("x" if is_new and self._checkpointer.good() else ""):
            remedy = (
                "resume that run (--run-dir, or checkpoint.resume_from), or use another directory"
            )
            rule = "holds checkpoints of another run"
            raise ConfigError([Problem("checkpoint.directory", rule, remedy, directory)])

    def _load_from(self, address: str) -> Manifest:
        """Load one checkpoint, or a run's newest: its directory or its checkpoint directory."""
        parent, _, name = address.rstrip("/").rpartition("/")
        if parse_folder(name):
            return self._load_one(parent or ".", name)
        for root in (address, f"{address.rstrip('/')}/checkpoints"):
            elsewhere = self._checkpointer.elsewhere(storage_at(root))
            manifest = self._load_newest(elsewhere)
            if manifest is not None:
                self._checkpointer.changes = elsewhere.changes
                return manifest
        remedy = "give a run's directory or checkpoints; `drivetrain checkpoint ls` lists them"
        raise _cannot_begin(address, "there is no good checkpoint", remedy)

    def _load_one(self, root: str, folder: str) -> Manifest:
        """Load exactly this checkpoint, even if there are newer ones."""
        elsewhere = self._checkpointer.elsewhere(storage_at(root))
        try:
            manifest = elsewhere.load(self._state, folder)
        except DamagedCheckpoint as error:
            remedy = f"`drivetrain checkpoint ls {root}` lists the checkpoints there"
            raise _cannot_begin(f"{root}/{folder}", str(error), remedy) from error
        self._take_changes(elsewhere)
        self._checkpointer.changes = elsewhere.changes
        return manifest


def _cannot_begin(address: str, rule: str, remedy: str) -> ConfigError:
    shown = str(Path(address)) if "://" not in address else address
    return ConfigError([Problem("checkpoint.resume_from", rule, remedy, shown)])
