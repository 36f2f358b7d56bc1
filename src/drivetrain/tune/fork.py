"""Fork: a trial of a population starts from its donor's checkpoint, kept until it has its own.

    journal line  →  pin next to the donor's checkpoint  →  the fork and its donor train
                  →  the fork has saved, or has ended    →  the pin is released

The donor waits until the pin is set: nothing continues from a rung before all its forks are in the
journal and pinned. The journal and the forks' directories determine which pins should exist, so the
next driver of the study sets missing ones and releases leftover ones.
"""

from __future__ import annotations

from pathlib import Path

from drivetrain.checkpoint import catalogue, pins
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.storage import Storage, storage_at
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.tune.journal import Asked, Fork, State
from drivetrain.tune.population import Due
from drivetrain.tune.settings import Study


def begun(study: Study, due: Due) -> Asked:
    """The journal entry of a fork, with its donor's checkpoint that it starts from."""
    run_dir = study.run_dir(due.donor)
    try:
        located = locate(str(run_dir))
        folder = located.choose(due.step).folder
    except ConfigError as error:
        raise DrivetrainError(
            f"trial {due.trial} cannot start from trial {due.donor} at step {due.step} ({error}); "
            "members of a population must save: see checkpoint.every_steps and checkpoint.contents"
        ) from None
    root = Path(located.storage.address)
    inside = "://" not in located.storage.address and root.is_relative_to(study.path.absolute())
    shown = root.relative_to(study.path.absolute()).as_posix() if inside else ""
    checkpoint = f"{shown or located.storage.address}/{folder}"
    return Asked(
        due.trial,
        due.values,
        Fork(due.donor, due.rung, due.step, due.member, checkpoint),
    )


def address(study: Study, fork: Fork) -> str:
    """Address of the checkpoint, even if the study's directory was moved."""
    if "://" in fork.checkpoint:
        return fork.checkpoint
    return str(study.path.absolute() / fork.checkpoint)


def words(study: Study, asked: Asked) -> list[str]:
    """Arguments for the script: the checkpoint to start from."""
    return [] if asked.fork is None else [f"checkpoint.resume_from={address(study, asked.fork)}"]


def flags(asked: Asked) -> list[str]:
    """Flags for the launcher: the searched keys may differ from the donor's."""
    return [] if asked.fork is None else [f"--accept-change={key}" for key in asked.values]


class Pins:
    """Keeps the pins of a study's forks up to date."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._settled: set[int] = set()
        """Forks that no longer need a pin."""
        self._pinned: set[int] = set()

    def keep(self, state: State) -> None:
        """Set missing pins and release those no longer needed; call before anything starts."""
        for asked in state.asked:
            if asked.fork is None or asked.trial in self._settled:
                continue
            storage, folder = self._where(asked.fork)
            if needs_donor(self._study, state, asked):
                if asked.trial not in self._pinned:
                    self._pin(storage, folder, asked)
            else:
                pins.release(storage, folder, holder(asked.trial))
                self._settled.add(asked.trial)

    def _pin(self, storage: Storage, folder: str, asked: Asked) -> None:
        try:
            pins.pin(storage, folder, holder(asked.trial))
        except DamagedCheckpoint as error:
            raise DrivetrainError(
                f"trial {asked.trial} cannot start from {storage.address}/{folder}: {error}"
            ) from None
        self._pinned.add(asked.trial)

    def _where(self, fork: Fork) -> tuple[Storage, str]:
        root, _, folder = address(self._study, fork).rpartition("/")
        return storage_at(root), folder


def needs_donor(study: Study, state: State, asked: Asked) -> bool:
    """Whether a fork would need its donor's checkpoint if it were started now."""
    if asked.fork is None or state.last(asked.trial) is not None:
        return False
    try:
        storage = locate(str(study.run_dir(asked.trial))).storage
    except ConfigError:
        return True
    return not any(entry.manifest for entry in catalogue.entries(storage))


def holder(trial: int) -> str:
    """The name of the pin of a trial."""
    return f"trial-{trial:05d}"
