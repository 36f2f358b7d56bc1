"""Fork: a trial of a population begins with its donor's checkpoint, which stays until it has one.

    journal line  →  pin beside the donor's checkpoint  →  the fork and its donor train
                  →  the fork has saved, or has ended   →  the pin is taken away

The donor rests until the pin is there: nothing of a rung is started before all its forks are
written down and pinned. Which pins there should be follows from the journal and the forks'
directories, so whoever drives the study next sets what is missing and takes away what is left.
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
    """A fork as the journal has it: with the checkpoint of its donor's that it begins with."""
    run_dir = study.run_dir(due.donor)
    try:
        located = locate(str(run_dir))
        folder = located.choose(due.step).folder
    except ConfigError as error:
        raise DrivetrainError(
            f"trial {due.trial} cannot begin with trial {due.donor} at step {due.step} ({error}); "
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
    """Of the checkpoint, wherever the study's directory is now."""
    if "://" in fork.checkpoint:
        return fork.checkpoint
    return str(study.path.absolute() / fork.checkpoint)


def words(study: Study, asked: Asked) -> list[str]:
    """For the script: where it begins."""
    return [] if asked.fork is None else [f"checkpoint.resume_from={address(study, asked.fork)}"]


def flags(asked: Asked) -> list[str]:
    """For the launcher: what is searched may differ from the donor's."""
    return [] if asked.fork is None else [f"--accept-change={key}" for key in asked.values]


class Pins:
    """The pins of a study's forks, kept as they should be."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._settled: set[int] = set()
        """Forks that need none any more."""
        self._pinned: set[int] = set()

    def keep(self, state: State) -> None:
        """Before anything is started: set what is missing, take away what is done with."""
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
                f"trial {asked.trial} is to begin with {storage.address}/{folder}: {error}"
            ) from None
        self._pinned.add(asked.trial)

    def _where(self, fork: Fork) -> tuple[Storage, str]:
        root, _, folder = address(self._study, fork).rpartition("/")
        return storage_at(root), folder


def needs_donor(study: Study, state: State, asked: Asked) -> bool:
    """Whether a fork would have to begin with its donor's checkpoint if it were started now."""
    if asked.fork is None or state.last(asked.trial) is not None:
        return False
    try:
        storage = locate(str(study.run_dir(asked.trial))).storage
    except ConfigError:
        return True
    return not any(entry.manifest for entry in catalogue.entries(storage))


def holder(trial: int) -> str:
    """Whom a pin is for, in its name."""
    return f"trial-{trial:05d}"
