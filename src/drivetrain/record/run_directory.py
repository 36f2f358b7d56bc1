"""The run directory: the one thing that desk, supervisor and worker share.

<run>/
  run.yaml                  the resolved config; every value knows where it came from
  attempts/<n>/             what each life of the run saw
  events/<rank>.jsonl       spans and scalars, append-only, one writer per file
  checkpoints/              weights and, later, resumable state
  tensorboard/              scalars for TensorBoard
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import EnvironmentProblem, Problem


@dataclass(frozen=True)
class RunDirectory:
    """Names every place inside a run; creates nothing until asked."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path, name: str | None) -> RunDirectory:
        """A new directory; a name already taken gets a number rather than being written over."""
        wanted = name or time.strftime("%Y-%m-%d_%H-%M-%S")
        for attempt in range(1, 10_000):
            path = output_dir / (wanted if attempt == 1 else f"{wanted}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                reason = error.strerror or str(error)
                raise EnvironmentProblem(
                    [Problem("output_dir", reason, "give a folder you may write to", str(path))]
                ) from error
            return cls(path.absolute())
        raise FileExistsError(f"{output_dir / wanted}: ten thousand runs have this name")

    @property
    def run_yaml(self) -> Path:
        """The resolved config."""
        return self.path / "run.yaml"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's log directory."""
        return self.path / "tensorboard"

    @property
    def scalars(self) -> Path:
        """The JSONL sink's file."""
        return self.path / "scalars.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def events(self, rank: int) -> Path:
        """The event file that rank, and only it, appends to."""
        return self.path / "events" / f"{rank:05d}.jsonl"

    def begin_attempt(self, facts: Mapping[str, Any]) -> Path:
        """Write down what a new life of the run starts with."""
        attempts = self.path / "attempts"
        number = 1 + sum(1 for _ in attempts.glob("*")) if attempts.exists() else 1
        path = attempts / f"{number:04d}"
        path.mkdir(parents=True)
        (path / "start.json").write_text(json.dumps(dict(facts), indent=2) + "\n")
        return path
