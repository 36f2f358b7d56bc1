"""TensorFlowDistributedTrainer: a Keras model under TensorFlow's own strategies, run by us.

TensorFlow computes, exchanges gradients and saves. From us come the workers' addresses
(TF_CONFIG), supervision and restarts, the run's directory, its ledger and its sinks.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain._version import __version__
from drivetrain.cluster.environments import Identity, detect
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Problem
from drivetrain.core.requirements import require
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import (
    Phase,
    ProgressPage,
    beginnings,
    mark_training,
    next_run_directory,
    remember_attempt,
    remember_directory,
)
from drivetrain.record.sinks import make_sink
from drivetrain.record.step_file import StepTimes

LEGACY = "TF_USE_LEGACY_KERAS"
"""Keras 3's `fit` does not run under MultiWorkerMirroredStrategy; tf-keras's does."""
_BACKUP = "tensorflow"
"""Beside the checkpoints of other runs, in the run's directory."""


def tf_config(addresses: Sequence[str], rank: int) -> dict[str, Any]:
    """What TensorFlow reads of the variable TF_CONFIG: every worker, and which one this is."""
    return {
        "cluster": {"worker": list(addresses)},
        "task": {"type": "worker", "index": rank},
    }


def own_address(identity: Identity) -> str:
    """Where the other workers reach this one, with a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((identity.main_address, 9))  # sends nothing; says by which way it would
        host = str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


class _Meeting:
    """What the workers of one attempt tell each other, over the store that ranks meet at."""

    def __init__(self, identity: Identity) -> None:
        from torch.distributed.rendezvous import rendezvous

        self._identity = identity
        self._store, _, _ = next(rendezvous("env://"))
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def all_addresses(self) -> list[str]:
        """Of every worker, by rank. A collective call."""
        self._set(f"address/{self._identity.rank}", own_address(self._identity))
        return [self._get(f"address/{rank}") for rank in range(self._identity.world_size)]

    def from_first(self, make: Callable[[], str]) -> str:
        """The first worker's word, on every worker."""
        if self._identity.is_main:
            self._set("word", make())
        return self._get("word")

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"tensorflow/{self._attempt}/{name}", value)

    def _get(self, name: str) -> str:
        found: str = self._store.get(f"tensorflow/{self._attempt}/{name}").decode()
        return found


class TensorFlowDistributedTrainer:
    """A Keras model over the devices of this machine, or over the ranks of `drivetrain train`.

    One process: MirroredStrategy. Several: MultiWorkerMirroredStrategy, its TF_CONFIG from the
    launcher. A worker that dies takes the others down; the supervisor starts all of them again,
    and `BackupAndRestore` resumes where it last saved.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        epochs: int = 1,
        output_dir: str = "runs",
        save_every: int | str = "epoch",
        tensorboard: bool = True,
    ) -> None:
        """`model()` or `model(strategy)` builds and compiles; it is called inside the scope.

        `save_every`: "epoch", or a number of steps. TensorFlow must not have been used before: a
        worker's server is started here.
        """
        if not callable(model) or hasattr(model, "fit"):
            rule = "must be a function that builds and compiles the model"
            remedy = "variables have to be made inside the strategy's scope: pass the function"
            raise ConfigError([Problem("model", rule, remedy, type(model).__name__)])
        if save_every != "epoch" and not (isinstance(save_every, int) and save_every > 0):
            remedy = 'use "epoch", or a number of steps'
            raise ConfigError([Problem("save_every", "not understood", remedy, save_every)])
        os.environ.setdefault(LEGACY, "1")
        self._tf = require("tensorflow", extra="tensorflow")
        self._build, self._epochs, self._save_every = model, epochs, save_every
        self._output_dir, self._sinks = Path(output_dir), ("tensorboard",) if tensorboard else ()
        self._identity = detect()
        self._meeting = None if self._identity.world_size == 1 else _Meeting(self._identity)
        self.strategy = self._make_strategy()
        self.model: Any = None
        self.run_dir: Path | None = None

    def _make_strategy(self) -> Any:
        if self._meeting is None:
            return self._tf.distribute.MirroredStrategy()
        if not self._tf.keras.Model.__module__.startswith("tf_keras"):
            rule = "Keras 3 cannot train on several workers"
            remedy = f"pip install tf-keras, and set {LEGACY}=1 before tf.keras is first used"
            raise EnvironmentProblem([Problem("keras", rule, remedy, has_value=False)])
        addresses = self._meeting.all_addresses()
        os.environ["TF_CONFIG"] = json.dumps(tf_config(addresses, self._identity.rank))
        return self._tf.distribute.MultiWorkerMirroredStrategy()

    def fit(self, train_dataset: Any, validation_data: Any = None, **settings: Any) -> Any:
        """Keras's `fit`, in the run's directory; its History.

        `train_dataset` is batched by the global batch; TensorFlow deals it to the workers.
        """
        mark_training()
        takes_strategy = bool(inspect.signature(self._build).parameters)
        with self.strategy.scope():
            self.model = self._build(self.strategy) if takes_strategy else self._build()
        with self._attempt() as (directory, recorder, number):
            keras = self._tf.keras.callbacks
            backup = keras.BackupAndRestore(
                str(directory.path / _BACKUP), save_freq=self._save_every
            )
            recording = _recording(keras.Callback, recorder, self._identity, number)
            history = self.model.fit(
                train_dataset,
                validation_data=validation_data,
                epochs=settings.pop("epochs", self._epochs),
                callbacks=[*settings.pop("callbacks", ()), backup, recording],
                verbose=settings.pop("verbose", 2 if self._identity.is_main else 0),
                **settings,
            )
            recorder.instant("run_end", steps=recording.step)
        return history

    @contextmanager
    def _attempt(self) -> Iterator[tuple[RunDirectory, Recorder, int]]:
        settled, number = next_run_directory()
        directory, attempt = self._directory(settled)
        self.run_dir = directory.path
        if self._identity.local_rank == 0:
            remember_directory(number, directory.path)
            remember_attempt(attempt)
        if self._identity.is_main:
            directory.write_run_yaml(f"name: {directory.path.name}\n", attempt)
            directory.begin_attempt(attempt, self._facts())
        sinks = [make_sink(name, directory) for name in self._sinks if self._identity.is_main]
        with Recorder(directory.events(self._identity.rank), sinks, attempt) as recorder:
            recorder.instant("attempt", number=attempt)
            yield directory, recorder, attempt

    def _directory(self, settled: Path | None) -> tuple[RunDirectory, int]:
        """Of an earlier attempt, or a new one; and which attempt this is."""

        def open_it() -> str:
            made = settled or RunDirectory.create(self._output_dir, None).path
            directory = RunDirectory.at(made)
            return json.dumps([str(directory.path), directory.next_attempt()])

        path, attempt = json.loads(
            open_it() if self._meeting is None else self._meeting.from_first(open_it)
        )
        return RunDirectory(Path(path)), attempt

    def _facts(self) -> dict[str, Any]:
        return {
            **beginnings(),
            "started_s": time.time(),
            "host": socket.gethostname(),
            "environment": self._identity.environment,
            "world_size": self._identity.world_size,
            "strategy": type(self.strategy).__name__,
            "drivetrain": __version__,
            "tensorflow": self._tf.__version__,
        }


def _recording(base: type, recorder: Recorder, identity: Identity, attempt: int) -> Any:
    """A callback of the Keras that is in use: each step's seconds, losses, and signs of life."""

    class Recording(base):  # type: ignore[misc]
        """A step's seconds are one number: TensorFlow does not say which of them it exchanged."""

        def __init__(self) -> None:
            super().__init__()
            self.step = 0
            self._page = ProgressPage.of_this_rank(identity.local_rank)
            self._began_s = time.perf_counter()

        def on_train_begin(self, logs: Any = None) -> None:
            self.step = int(self.model.optimizer.iterations.numpy())
            recorder.instant("resumed", step=self.step, attempt=attempt)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._began_s = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            took_s = time.perf_counter() - self._began_s
            recorder.step(StepTimes(self.step, self._began_s, 0.0, took_s, 0.0, 0.0, 0.0, 0.0))
            self._page.note(Phase.STEPPING, self.step)

        def on_test_begin(self, logs: Any = None) -> None:
            self._page.note(Phase.EVALUATING)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if identity.is_main:
                values = {f"train/{name}": float(value) for name, value in (logs or {}).items()}
                recorder.scalars(self.step, values)
            self._page.note(Phase.SAVING)

    return Recording()
