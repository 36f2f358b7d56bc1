"""TensorFlowDistributedTrainer: a Keras model under TensorFlow's own strategies.

TensorFlow computes, exchanges gradients and saves. Drivetrain provides the workers' addresses
(TF_CONFIG), supervision and restarts, the run's directory, its ledger and its sinks.
"""

from __future__ import annotations

import atexit
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
    launcher_of,
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
"""Name of the backup's directory inside the run's directory."""
_POLL_S = 0.5


def tf_config(addresses: Sequence[str], rank: int, num_servers: int = 0) -> dict[str, Any]:
    """Return TF_CONFIG's contents: the members of the cluster, and which one this process is.

    With parameter servers the first rank coordinates, the next ones serve, the others compute.
    """
    first_worker = 1 + num_servers
    cluster = {"worker": list(addresses)}
    if num_servers:
        cluster = {
            "chief": list(addresses[:1]),
            "ps": list(addresses[1:first_worker]),
            "worker": list(addresses[first_worker:]),
        }
    index = rank
    for job, members in cluster.items():
        if index < len(members):
            return {"cluster": cluster, "task": {"type": job, "index": index}}
        index -= len(members)
    raise ValueError(f"rank {rank} of {len(addresses)}")


def own_address(identity: Identity) -> str:
    """Return the address at which other workers reach this one, with a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((identity.main_address, 9))  # sends nothing; selects the network interface
        host = str(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


class _Meeting:
    """Messages between the workers of one attempt, through torch's rendezvous store."""

    def __init__(self, identity: Identity) -> None:
        from torch.distributed.rendezvous import rendezvous

        self._identity = identity
        self._store, _, _ = next(rendezvous("env://"))
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def all_addresses(self) -> list[str]:
        """Return the address of every worker, by rank. A collective call."""
        self._set(f"address/{self._identity.rank}", own_address(self._identity))
        return [self._get(f"address/{rank}") for rank in range(self._identity.world_size)]

    def from_first(self, make: Callable[[], str]) -> str:
        """Return on every worker the text that `make` returns on the first worker."""
        if self._identity.is_main:
            self._set("word", make())
        return self._get("word")

    def leave(self) -> None:
        """Tell the others that the first worker's script is over."""
        self._set("over", "1")

    def is_over(self) -> bool:
        """True if the first worker's script is over."""
        found: bool = self._store.check([f"tensorflow/{self._attempt}/over"])
        return found

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"tensorflow/{self._attempt}/{name}", value)

    def _get(self, name: str) -> str:
        found: str = self._store.get(f"tensorflow/{self._attempt}/{name}").decode()
        return found


class TensorFlowDistributedTrainer:
    """Trains a Keras model on this machine's devices, or on the ranks of `drivetrain train`.

    One process uses MirroredStrategy. Several use MultiWorkerMirroredStrategy, with TF_CONFIG from
    the launcher, or ParameterServerStrategy, with some of the ranks as servers. If a worker dies,
    the others end too; the supervisor restarts all of them, and `BackupAndRestore` resumes from its
    last backup.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        epochs: int = 1,
        output_dir: str = "runs",
        save_every: int | str = "epoch",
        tensorboard: bool = True,
        parameter_servers: int = 0,
    ) -> None:
        """Create the strategy; `model()` or `model(strategy)` builds and compiles in its scope.

        `save_every` is "epoch" or a number of steps. `parameter_servers` is the number of ranks
        that hold the variables; rank 0 coordinates, and the others compute, each at its own pace.
        The scripts of all ranks but 0 end in `fit`, when rank 0's ends. TensorFlow must not have
        been used before, because a worker's server is started here.
        """
        if not callable(model) or hasattr(model, "fit"):
            rule = "must be a function that builds and compiles the model"
            remedy = "pass the function: variables must be created in the strategy's scope"
            raise ConfigError([Problem("model", rule, remedy, type(model).__name__)])
        if save_every != "epoch" and not (isinstance(save_every, int) and save_every > 0):
            remedy = 'use "epoch", or a number of steps'
            raise ConfigError([Problem("save_every", "not valid", remedy, save_every)])
        os.environ.setdefault(LEGACY, "1")
        self._tf = require("tensorflow", extra="tensorflow")
        self._build, self._epochs, self._save_every = model, epochs, save_every
        self._output_dir, self._sinks = Path(output_dir), ("tensorboard",) if tensorboard else ()
        self._identity = detect()
        self._num_servers = checked_servers(
            parameter_servers, self._identity.world_size, save_every
        )
        self._meeting = None if self._identity.world_size == 1 else _Meeting(self._identity)
        self._server: Any = None
        """Server of a rank that serves or computes for rank 0, the coordinator."""
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
        found = tf_config(addresses, self._identity.rank, self._num_servers)
        os.environ["TF_CONFIG"] = json.dumps(found)
        if not self._num_servers:
            return self._tf.distribute.MultiWorkerMirroredStrategy()
        os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # report a lost worker at once
        resolver = self._tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if not self._identity.is_main:
            job, index = resolver.task_type, resolver.task_id
            self._server = self._tf.distribute.Server(resolver.cluster_spec(), job, index)
            return None
        atexit.register(self._meeting.leave)
        return self._tf.distribute.ParameterServerStrategy(resolver)

    def fit(self, train_dataset: Any, validation_data: Any = None, **settings: Any) -> Any:
        """Run Keras's `fit` in the run's directory and return its History.

        `train_dataset` is batched by the global batch size; TensorFlow distributes it to the
        workers. With parameter servers, each worker reads all of it, `repeat()`ed, and does its
        share of `steps_per_epoch`; only rank 0 returns.
        """
        mark_training()
        if self._server is not None:
            self._serve()
        if self._num_servers and not settings.get("steps_per_epoch"):
            rule = "must be set: with parameter servers no worker knows when an epoch ends"
            remedy = "pass fit(…, steps_per_epoch=n)"
            raise ConfigError([Problem("steps_per_epoch", rule, remedy, has_value=False)])
        takes_strategy = bool(inspect.signature(self._build).parameters)
        with self.strategy.scope():
            self.model = self._build(self.strategy) if takes_strategy else self._build()
        with self._attempt() as (directory, recorder, number):
            keras = self._tf.keras.callbacks
            backup = keras.BackupAndRestore(
                str(directory.path / _BACKUP), save_freq=self._save_every
            )
            progress = _Progress(recorder, self._identity, number)
            recording = _recording(keras.Callback, progress, by_step=not self._num_servers)
            history = self.model.fit(
                train_dataset,
                validation_data=validation_data,
                epochs=settings.pop("epochs", self._epochs),
                callbacks=[*settings.pop("callbacks", ()), backup, recording],
                verbose=settings.pop("verbose", 2 if self._identity.is_main else 0),
                **settings,
            )
            recorder.instant("run_end", steps=progress.step)
        return history

    def _serve(self) -> None:
        """Serve rank 0, the coordinator, until its script ends; then end this script."""
        page = ProgressPage.of_this_rank(self._identity.local_rank)
        with self._attempt():
            while self._meeting is not None and not self._meeting.is_over():
                page.note(Phase.EVALUATING)  # alive; only the coordinator knows the speed
                time.sleep(_POLL_S)
        raise SystemExit(0)

    @contextmanager
    def _attempt(self) -> Iterator[tuple[RunDirectory, Recorder, int]]:
        settled, number = next_run_directory()
        directory, attempt = self._directory(settled)
        self.run_dir = directory.path
        facts = self._facts()  # with the starts before it, which remember_attempt() forgets
        if self._identity.local_rank == 0:
            remember_directory(number, directory.path)
            remember_attempt(attempt)
        if self._identity.is_main:
            directory.write_run_yaml(f"name: {directory.path.name}\n", attempt)
            directory.begin_attempt(attempt, facts)
        sinks = [make_sink(name, directory) for name in self._sinks if self._identity.is_main]
        with Recorder(directory.events(self._identity.rank), sinks, attempt) as recorder:
            recorder.instant("attempt", number=attempt)
            yield directory, recorder, attempt

    def _directory(self, settled: Path | None) -> tuple[RunDirectory, int]:
        """Return the earlier attempt's run directory or a new one, and this attempt's number."""

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
            "launcher": launcher_of(self._identity.environment),
            "world_size": self._identity.world_size,
            "strategy": type(self.strategy).__name__,
            "drivetrain": __version__,
            "tensorflow": self._tf.__version__,
        }


def checked_servers(num_servers: int, world_size: int, save_every: int | str) -> int:
    """Return `num_servers`; ConfigError if there are too few ranks or `save_every` conflicts."""
    problems = []
    if num_servers and world_size < num_servers + 2:
        rule = f"{world_size} ranks are too few: one coordinates and at least one must compute"
        remedy = f"start {num_servers + 2} or more: drivetrain train --nproc-per-node …"
        problems.append(Problem("parameter_servers", rule, remedy, num_servers))
    if num_servers and save_every != "epoch":
        rule = "with parameter servers, workers have no common step to save at"
        problems.append(Problem("save_every", rule, 'use "epoch"', save_every))
    if problems:
        raise ConfigError(problems)
    return num_servers


class _Progress:
    """What this rank records of its training: seconds, losses, and liveness.

    A step has one duration: TensorFlow does not report how much of it was communication.
    """

    def __init__(self, recorder: Recorder, identity: Identity, attempt: int) -> None:
        self.step = 0
        self._recorder, self._attempt, self._is_main = recorder, attempt, identity.is_main
        self._page = ProgressPage.of_this_rank(identity.local_rank)
        self._began_s = time.perf_counter()

    def resumed(self, step: int) -> None:
        self.step = step
        self._recorder.instant("resumed", step=step, attempt=self._attempt)

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def end_step(self) -> None:
        self._end_steps(self.step + 1)
        self._page.note(Phase.STEPPING, self.step)

    def evaluating(self, step: int) -> None:
        self._end_steps(step)
        self._page.note(Phase.EVALUATING)

    def end_epoch(self, step: int, logs: Any) -> None:
        """Record the steps up to `step`; those not yet recorded share their time equally."""
        self._end_steps(step)
        if self._is_main:
            values = {f"train/{name}": float(value) for name, value in (logs or {}).items()}
            self._recorder.scalars(self.step, values)
        self._page.note(Phase.SAVING, self.step)

    def _end_steps(self, step: int) -> None:
        took_s = (time.perf_counter() - self._began_s) / max(1, step - self.step)
        for number in range(self.step + 1, step + 1):
            times = StepTimes(number, self._began_s, 0.0, took_s, 0.0, 0.0, 0.0, 0.0)
            self._recorder.step(times)
            self._began_s += took_s
        self.step = step


def _recording(base: type, progress: _Progress, *, by_step: bool) -> Any:
    """Return a callback for the Keras in use; with parameter servers it must not see steps."""

    class EpochRecording(base):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            progress.resumed(int(self.model.optimizer.iterations.numpy()))

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            progress.begin()

        def on_test_begin(self, logs: Any = None) -> None:
            progress.evaluating(int(self.model.optimizer.iterations.numpy()))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            progress.end_epoch(int(self.model.optimizer.iterations.numpy()), logs)

    class StepRecording(EpochRecording):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            progress.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            progress.end_step()

    return StepRecording() if by_step else EpochRecording()
