"""Locate: find the folder of checkpoints for an address that a user types.

A run's directory, a folder of checkpoints, one checkpoint, or any of these at an fsspec address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from drivetrain.checkpoint import catalogue
from drivetrain.checkpoint.catalogue import Entry
from drivetrain.checkpoint.manifest import DamagedCheckpoint, Manifest, parse_folder
from drivetrain.checkpoint.storage import Storage, storage_at
from drivetrain.core.bounded import SMALL_BYTES, followed, one_line, parse_yaml
from drivetrain.core.errors import ConfigError, DamagedRun, DrivetrainError, Problem
from drivetrain.core.redaction import REMOVED


@dataclass(frozen=True)
class Located:
    """A folder of checkpoints, and one checkpoint in it if the address names one."""

    storage: Storage
    folder: str | None = None

    def entries(self) -> list[Entry]:
        """Return all checkpoints, newest first, or only the named one."""
        found = catalogue.entries(self.storage)
        return [e for e in found if self.folder in (None, e.folder)]

    def best_step(self) -> int:
        """Return the step of the best evaluation, as stored in the newest checkpoint."""
        run = self.choose().values.get("common", {}).get("run", {}).get("value", {})
        step = run.get("best_step") if isinstance(run, dict) else None
        if not isinstance(step, int):
            rule = f"no evaluation of {self.storage.address} was marked as best"
            remedy = "train with checkpoint.keep_best, or give --step"
            raise ConfigError([Problem("--best", rule, remedy, has_value=False)])
        return step

    def choose(self, step: int | None = None) -> Manifest:
        """Return the checkpoint of a step, or the newest good one."""
        found = [e for e in self.entries() if step in (None, e.step)]
        good = next((entry.manifest for entry in found if entry.manifest is not None), None)
        if good is not None:
            return good
        if found:
            raise damaged(found[0].folder, found[0].problem)
        steps = sorted({entry.step for entry in self.entries()})
        raise ConfigError(
            [
                Problem(
                    "--step",
                    f"{self.storage.address} has no checkpoint for this step",
                    f"choose one of {', '.join(map(str, steps))}",
                    step,
                )
            ]
        )


def locate(address: str) -> Located:
    """Find the checkpoints at an address; raise ConfigError if there are none."""
    try:
        found = _search(address)
    except DrivetrainError:
        raise
    except Exception as error:  # the error types of a store are defined in its own library
        reason = str(error).strip().splitlines() or [type(error).__name__]
        rule = f"cannot be listed ({reason[0]})"
        remedy = "check the address, and the credentials and endpoint in the environment"
        raise ConfigError([Problem("checkpoints", rule, remedy, address)]) from error
    if found is None:
        remedy = (
            "give a run's directory, a folder of checkpoints, one checkpoint, or an address like "
            "s3://bucket/run"
        )
        raise ConfigError([Problem("checkpoints", "no checkpoints found", remedy, address)])
    return found


def _search(address: str) -> Located | None:
    parent, _, name = address.rstrip("/").rpartition("/")
    if parse_folder(name) and name in storage_at(parent or ".").names():
        return Located(storage_at(parent or "."), name)
    for storage in _candidates(address):
        if any(parse_folder(name) for name in storage.names()):
            return Located(storage)
    return None


def damaged(folder: str, problem: DamagedCheckpoint | str) -> DrivetrainError:
    """Return the error for a checkpoint that cannot be used."""
    remedy = "run `drivetrain checkpoint verify` to find the good ones, and choose one with --step"
    return DrivetrainError(str(Problem(folder, str(problem), remedy, has_value=False)))


def _candidates(address: str) -> Iterator[Storage]:
    here = storage_at(address)
    yield here
    yield storage_at(f"{address.rstrip('/')}/checkpoints")
    elsewhere = _directory_of_run(here)
    if elsewhere is not None:
        yield storage_at(elsewhere)


def _directory_of_run(run: Storage) -> str | None:
    """Return the `checkpoint.directory` of a run, if it was set."""
    if run.size("run.yaml") is None:
        return None
    where = f"{run.address}/run.yaml"
    try:
        config = parse_yaml(run.read("run.yaml", length=SMALL_BYTES))["config"]
        directory = config["checkpoint"]["directory"]
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise DamagedRun(
            f"{where}: does not name a checkpoint folder ({one_line(error)})"
        ) from None
    if isinstance(directory, str) and REMOVED in directory:
        rule = "the run does not store the password of this address"
        remedy = "pass the address of the checkpoints instead of the run"
        raise ConfigError([Problem("checkpoint.directory", rule, remedy, directory)])
    return None if directory is None else followed(f"{where}: checkpoint.directory", directory)
