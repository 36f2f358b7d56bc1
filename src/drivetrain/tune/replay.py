"""Replay: trains a trial of a study again from the root of its lineage, in a separate run.

Where the lineage has a fork, the replayed run stops and resumes with the values of the next trial.
It uses no checkpoint of the study, and must end with the same bits as the study's trial.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint.compare import Difference, compare
from drivetrain.checkpoint.locate import Located, locate
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.tune.journal import Ended, State
from drivetrain.tune.sampling import values_as_words
from drivetrain.tune.settings import Study
from drivetrain.tune.space import Scalar

FOLDER = "replays"
_TENSORS = ("model.", "optimizer.", "ema.", "rank.")
"""All state that the next step depends on; evaluation state is left out, since a trial that paused
may have been evaluated more often."""


@dataclass(frozen=True)
class Segment:
    """A part of a lineage: one trial's values, up to a step."""

    trial: int
    values: Mapping[str, Scalar]
    stop_at: int | None
    """None: the end of the run."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    segments: tuple[Segment, ...]
    step: int
    study_sha256: str
    """Digest of the weights."""
    replay_sha256: str
    num_identical: int
    """Number of equal tensors: weights, and the optimizer's and each rank's state."""
    differences: tuple[Difference, ...]
    folder: Path

    @property
    def is_same(self) -> bool:
        """Whether all compared tensors are equal bit for bit."""
        return not self.differences and self.study_sha256 == self.replay_sha256


def line(state: State, trial: int) -> list[int]:
    """The trials from the root to a trial, each the donor of the next."""
    found = [trial]
    while (fork := state.asked[found[0]].fork) is not None:
        found.insert(0, fork.donor)
    return found


def segments(study: Study, state: State, trial: int) -> tuple[Segment, ...]:
    """The segments to train, one after the other, to get where a trial has got."""
    last = _last_done(state, trial)
    trials = line(state, trial)
    forks = [state.asked[each].fork for each in trials[1:]]
    rungs = study.settings.rungs
    ends = [fork.step for fork in forks if fork is not None]
    end = rungs[last.rung] if last.rung < len(rungs) else None
    return tuple(
        Segment(each, state.asked[each].values, stop_at)
        for each, stop_at in zip(trials, [*ends, end], strict=True)
    )


def _last_done(state: State, trial: int) -> Ended:
    last = state.last(trial)
    if last is None or last.outcome != "done":
        rule = "has not reached a rung" if last is None else f"is {last.outcome.replace('_', ' ')}"
        raise ConfigError(
            [Problem("--trial", rule, "name one that is done, or left at a rung", trial)]
        )
    return last


def replay(study: Study, state: State, trial: int) -> Replay:
    """Train it again on this machine, and compare; the run is kept if it differs."""
    parts = segments(study, state, trial)
    step = _last_done(state, trial).step
    folder = study.path / FOLDER / f"{trial:05d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, part in enumerate(parts):
        _train(study, part, folder, is_first=number == 0)
    ours, theirs = locate(str(study.run_dir(trial))), locate(str(folder))
    one, other = ours.choose(step), theirs.choose(step)
    found = compare((ours.storage, one), (theirs.storage, other))
    differences = tuple(each for each in found.differences if each.name.startswith(_TENSORS))
    done = Replay(
        parts,
        step,
        _sha256(ours, one),
        _sha256(theirs, other),
        found.num_identical,
        differences,
        folder,
    )
    if done.is_same:
        shutil.rmtree(folder)
    return done


def _train(study: Study, part: Segment, folder: Path, *, is_first: bool) -> None:
    settings = study.settings
    words = [*settings.script_args, *values_as_words(part.values)]
    if part.stop_at is not None:
        words.append(f"stop_at_step={part.stop_at}")
    accepted = [] if is_first else [f"--accept-change={key}" for key in part.values]
    command = [
        *(sys.executable, "-m", "drivetrain", "train", f"--run-dir={folder.absolute()}"),
        f"--nproc-per-node={settings.processes_per_trial}",
        *(*accepted, settings.script, *words),
    ]
    done = subprocess.run(  # noqa: S603 - the study's own script
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-5:])
        raise DrivetrainError(f"trial {part.trial} cannot be replayed; its run ended with:\n{said}")


def _sha256(located: Located, manifest: Manifest) -> str:
    tensors = WholeTensors(located.storage, manifest)
    names = [name for name in tensors.names() if name.startswith("model.")]
    return weights_sha256({name: tensors.read(name) for name in names})
