"""Attempt: one start of a run, from opening its directory to its last event.

`Trainer.fit` and `KeptLoop` open an attempt and train inside `training()`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.checkpointer import versions
from drivetrain.core.errors import STOPS
from drivetrain.core.redaction import clean_text
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.parallel.model import Choice
from drivetrain.record.plain_run import is_plain
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import (
    Phase,
    beginnings,
    launcher_of,
    next_run_directory,
    remember_attempt,
    remember_directory,
)
from drivetrain.record.sinks import is_per_node, make_sink
from drivetrain.train.assemble import Assembly
from drivetrain.train.early_stopping import EarlyStopping
from drivetrain.train.evaluate import evaluate
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.saving.config_record import ConfigRecord
from drivetrain.train.saving.origin import start_from_newest
from drivetrain.train.saving.pretrained import keep_companions
from drivetrain.train.saving.run_state import RunState
from drivetrain.train.saving.saver import Saver
from drivetrain.train.task import Task
from drivetrain.train.watch.compiling import announcing
from drivetrain.train.watch.reporter import Reporter


@dataclass(frozen=True)
class Attempt:
    """What training records to and saves with."""

    assembly: Assembly
    history: History
    directory: RunDirectory
    config: ConfigRecord
    recorder: Recorder
    reporter: Reporter
    saver: Saver

    @property
    def number(self) -> int:
        """Number of the attempt, counted from 1."""
        return self.config.attempt

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context of the training: report its start, handle stop requests, record a failure."""
        try:
            self.reporter.begin(self.directory.path)
            self.saver.begin()
            self.assembly.engine.spread.when_settled(self._note_choice)
            with announcing(self.assembly.page, self.assembly.engine.timer.compiled):
                yield
        except GeneratorExit:  # a user's own loop, left during a step or by an error
            self._failed("the script left its loop during a step or because of an error")
            raise
        except BaseException as error:
            self._failed(clean_text(repr(error)))
            if isinstance(error, STOPS) and is_plain() and self.assembly.world.is_main:
                with suppress(OSError):  # of a full disk; the run is saved, or said not to be
                    self._record_stop(error)
            raise
        finally:
            self.saver.close()
            self.reporter.close()

    def evaluate(self, task: Task, feeds: Mapping[str, EvaluationFeed]) -> EvaluationResult:
        """Evaluate every validation sample once; show, record and remember the result."""
        step = self.saver.at.step
        self.assembly.page.note(Phase.EVALUATING)
        with self.reporter.aside(), self.recorder.measure("evaluation", step):
            result = evaluate_all(task, feeds, self.assembly, step, self.reporter.evaluation)
        self.history.evaluations.append(result)
        self.assembly.engine.learning_rate.after("evaluation", result.metrics)
        self.saver.score(result)
        stopping = EarlyStopping.of(self.assembly.config.early_stopping)
        # the result is the same on every rank, so all ranks ask
        if stopping is not None and (reason := stopping.reason(self.history)) is not None:
            self.saver.ask_to_end(reason)
        return result

    def evaluate_after(self, task: Task, feeds: Mapping[str, EvaluationFeed]) -> EvaluationResult:
        """Evaluate once more, after the attempt's end."""
        found: list[tuple[str, EvaluationResult, int | None]] = []
        result = evaluate_all(
            task, feeds, self.assembly, self.saver.at.step, lambda *one: found.append(one)
        )
        self.history.evaluations.append(result)
        self.saver.score_after(result)
        self.add_evaluations(found)
        return result

    def end(self) -> None:
        """Record the end of a run that was not interrupted."""
        self.recorder.instant("run_end", **self.history.summary())

    def _note_choice(self, choice: Choice) -> None:
        """Record the value of a key that was left open and was chosen during the run."""
        if self.assembly.world.is_main:
            self.config.choose(choice.key, choice.value, choice.why)
            self.reporter.say(choice.said)

    def _failed(self, why: str) -> None:
        self.recorder.instant("run_failed", error=why, step=self.saver.at.step)

    def _record_stop(self, error: BaseException) -> None:
        """Record how the attempt ended, which is otherwise up to the supervisor."""
        end = {
            "kind": "preempted",
            "step": self.saver.at.step,
            "host": socket.gethostname(),
            "time_s": time.time(),
            "detail": clean_text(str(error)),
            "restarts": False,
        }
        self.directory.end_attempt(self.number, end)

    def add_evaluations(self, found: Sequence[tuple[str, EvaluationResult, int | None]]) -> None:
        """Record evaluations that were made after the attempt's end."""
        with open_recorder(self.assembly, self.directory, self.number) as recorder:
            reporter = Reporter(self.assembly, recorder, self.history)
            for one in found:
                reporter.evaluation(*one)
            reporter.close()
            recorder.instant("run_end", **self.history.summary())  # it must stay the last event


def evaluate_all(
    task: Task,
    feeds: Mapping[str, EvaluationFeed],
    assembly: Assembly,
    step: int,
    report: Callable[[str, EvaluationResult, int | None], None],
) -> EvaluationResult:
    """Evaluate each set of validation data; return all metrics, prefixed with the sets' names."""
    engine, metrics, num_samples = assembly.engine, dict[str, float](), 0
    for name, feed in feeds.items():
        with engine.autocast, engine.evaluated_weights():
            found = evaluate(task, engine.spread, feed, assembly.world, step)
        report(name, found, feed.length)
        lead = f"{name}/" if name else ""
        metrics |= {f"{lead}{metric}": value for metric, value in found.metrics.items()}
        num_samples += found.num_samples
    return EvaluationResult(step, metrics, num_samples)


@contextmanager
def open_attempt(
    assembly: Assembly, history: History, run: RunState, began_s: float
) -> Iterator[Attempt]:
    """Open the run's directory, load its newest good checkpoint and claim it. Collective."""
    directory = _open_directory(assembly)
    history.run_dir = directory.path
    start = start_from_newest(assembly, history, run, directory)
    if assembly.engine.averages is not None:
        assembly.engine.averages.begin()
    _begin(assembly, directory, start.attempt, run.at.step)
    with open_recorder(assembly, directory, start.attempt) as recorder:
        recorder.instant("attempt", number=start.attempt, resumed_step=run.at.step)
        recorder.spans(run.at.step, ("start_up", began_s, time.perf_counter()))
        reporter = Reporter(assembly, recorder, history)
        config = ConfigRecord(assembly.resolved, directory, start.attempt)
        saver = Saver(assembly, run, start, config, recorder, reporter.say)
        if assembly.world.is_main and assembly.config.checkpoint.every_steps is not None:
            problem = keep_companions(assembly, saver.storage)
            if problem:
                reporter.say(
                    f"warning: the model's config could not be saved ({problem}); `drivetrain "
                    "checkpoint export` will write only the weights"
                )
        yield Attempt(assembly, history, directory, config, recorder, reporter, saver)
    saver.pass_on_ctrl_c()


def _open_directory(assembly: Assembly) -> RunDirectory:
    """Rank 0 creates the directory, or finds an earlier attempt's; all ranks use it. Collective."""
    world, config = assembly.world, assembly.config
    settled, number = next_run_directory()
    path = ""
    if world.is_main or world.mesh is None:  # each live replica decides on its own
        made = settled or RunDirectory.create(config.output_dir, config.name).path
        path = str(RunDirectory.at(made).path)
    directory = RunDirectory(Path(world.agree(path)))
    if world.identity.local_rank == 0:
        remember_directory(number, directory.path)
    return directory


def _begin(assembly: Assembly, directory: RunDirectory, number: int, resumed_step: int) -> None:
    """Record, on rank 0, what this attempt starts with."""
    facts = _facts(assembly)  # with the starts before it, which remember_attempt() forgets
    if assembly.world.identity.local_rank == 0:
        remember_attempt(number)
    if assembly.world.is_main:
        directory.write_run_yaml(assembly.resolved.to_yaml(), number)
        directory.begin_attempt(number, {**facts, "resumed_step": resumed_step})


def open_recorder(assembly: Assembly, directory: RunDirectory, attempt: int) -> Recorder:
    """Open this rank's event file; sinks are on rank 0, some on each node's first rank."""
    identity = assembly.world.identity
    names: tuple[str, ...] = tuple(assembly.config.record.sinks)
    if not assembly.world.is_main:
        names = tuple(name for name in names if identity.local_rank == 0 and is_per_node(name))
    sinks = [make_sink(name, directory) for name in names]
    recorder = Recorder(directory.events(identity.rank), sinks, attempt)
    recorder.watch_system(assembly.config.record.system_every_s)
    return recorder


def _facts(assembly: Assembly) -> dict[str, Any]:
    identity = assembly.world.identity
    return {
        **beginnings(),
        "started_s": time.time(),
        "host": socket.gethostname(),
        "launcher": launcher_of(identity.environment),
        "world_size": identity.world_size,
        "total_steps": assembly.total_steps,
        "layout": str(assembly.world.layout),
        "device": str(assembly.world.device),
        "device_name": assembly.world.accelerator.name,
        **versions(),
    }
