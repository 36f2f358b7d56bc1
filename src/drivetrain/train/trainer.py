"""Trainer: the whole run in one call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.config.load import resolve
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import NotSaved
from drivetrain.core.intercept import Intercepted, is_intercepting
from drivetrain.core.stateful import Stateful
from drivetrain.data.sources import refuse_one_pass
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import Phase
from drivetrain.train.assemble import Assembly, assemble, make_evaluation_feed, some_batch
from drivetrain.train.bitwise_mode import process_settings
from drivetrain.train.evaluate import evaluate
from drivetrain.train.history import History
from drivetrain.train.hooks import Hook, HookCaller, hooks_from_environment
from drivetrain.train.loop import Loop
from drivetrain.train.open_run import begin_attempt, open_directory, open_recorder
from drivetrain.train.saving.saver import Saver
from drivetrain.train.saving.weights import write_weights
from drivetrain.train.task import Task
from drivetrain.train.watch.compiling import announcing
from drivetrain.train.watch.logged_steps import LoggedSteps
from drivetrain.train.watch.non_finite import NonFiniteWatch, has_whole_loss_on_host
from drivetrain.train.watch.reporter import Reporter


class Trainer:
    """Trains a task as a config says, on however many ranks were started.

    The numbers come from the config, not from the number of ranks. After `fit`, `model` holds this
    rank's part of the trained model and `<run_dir>/checkpoints/weights.pt` the whole of it.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig | ResolvedConfig | Mapping[str, Any],
        hooks: Sequence[Hook] = (),
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.task = task
        self.resolved = resolve(config)
        self.hooks = (*hooks, *hooks_from_environment())
        self.stateful = {**_stateful_hooks(self.hooks), **(stateful or {})}
        """Objects with state_dict and load_state_dict, saved and restored with the run."""
        self.history = History()
        self.assembly: Assembly | None = None
        self.run_dir: Path | None = None
        self.attempt = 0
        """Which life of the run this is, counted from 1; set by fit()."""

    @property
    def config(self) -> RunConfig:
        """The config as resolved so far; what was chosen automatically is filled in by fit()."""
        return self.resolved.config

    @property
    def model(self) -> nn.Module:
        """The user's own module, from the start of fit() on."""
        if self.assembly is None:
            raise RuntimeError("the model is built by fit()")
        return self.assembly.engine.spread.inner

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: print here, not on every rank."""
        return self.assembly.world.is_main if self.assembly is not None else detect().is_main

    def fit(self, train: Any, val: Any = None) -> History:
        """Train, evaluate, record. `train` and `val` are datasets, DataLoaders or iterables."""
        if is_intercepting():
            raise Intercepted(self.task, self.resolved, some_batch(self.config, train))
        began = time.perf_counter()
        with process_settings(self.config):
            assembly = assemble(self.task, self.resolved, train)
            self.assembly, self.resolved = assembly, assembly.resolved
            self.history = History()
            directory = open_directory(assembly)
            self.run_dir = self.history.run_dir = directory.path
            saver = Saver(assembly, self.history, self.stateful)
            self.attempt = attempt = saver.open(directory)
            begin_attempt(assembly, directory, attempt, saver.at.step)
            with open_recorder(assembly, directory, attempt) as recorder:
                recorder.instant("attempt", number=attempt, resumed_step=saver.at.step)
                recorder.spans(saver.at.step, ("start_up", began, time.perf_counter()))
                try:
                    self._train(assembly, recorder, saver, train, val)
                except NotSaved:  # there may be room for the weights, or it is another disk
                    with contextlib.suppress(OSError):
                        write_weights(assembly, directory.checkpoints / "weights.pt")
                    raise
                write_weights(assembly, directory.checkpoints / "weights.pt")
                self.history.total_time = time.perf_counter() - began
                recorder.instant("run_end", **self.history.summary())
        return self.history

    def _train(
        self, assembly: Assembly, recorder: Recorder, saver: Saver, train: Any, val: Any
    ) -> None:
        config, notify = assembly.config, HookCaller(self, self.hooks)
        reporter = Reporter(assembly, recorder, self.history)
        loop = kind_of_loop(config)(
            task=self._watched(assembly, saver),
            engine=assembly.engine,
            feed=assembly.feed,
            recorder=recorder,
            notify=notify,
            logging_steps=config.record.logging_steps,
            evaluate_every=config.evaluation.every_steps,
            evaluate=self._evaluator(assembly, reporter, recorder, notify, saver, val),
            report=reporter.steps,
            logged=LoggedSteps.of(config, self.history, reporter.say),
            saver=saver,
            at=saver.at,
        )
        if config.fault_tolerance == "live":
            from drivetrain.train.live.training import go_live  # torchft's, and only then

            loop = go_live(loop, train, config)

        try:
            reporter.begin(self.run_dir)
            saver.begin(recorder, reporter.say)
            notify("on_fit_start")
            assembly.engine.model.train()
            with announcing(saver.page, loop.timer.compiled):
                loop.run(assembly.total_steps, config.num_train_epochs)
            notify("on_fit_end")
        except BaseException as error:
            notify("on_exception", error)
            recorder.instant("run_failed", error=repr(error), step=saver.at.step)
            raise
        finally:
            saver.close()
            reporter.close()

    def _watched(self, assembly: Assembly, saver: Saver) -> Task:
        """The task, with an eye on its loss where that costs nothing."""
        parallel = assembly.config.parallel
        if not has_whole_loss_on_host(assembly) or self.run_dir is None:
            return self.task
        watch = NonFiniteWatch(
            rank=assembly.world.rank,
            folder=RunDirectory(self.run_dir).attempt(self.attempt) / "non_finite",
            step=lambda: saver.at.step,
            sample_ids=assembly.feed.sample_ids,
            micro_batch_size=assembly.feed.plan.micro_batch_size,
            inner=assembly.engine.spread.inner,
            num_losses=lambda: assembly.engine.meter.num_losses,
            is_whole=not parallel.traits.shards and parallel.cp == 1,
        )
        return watch.over(self.task)

    def _evaluator(
        self,
        assembly: Assembly,
        reporter: Reporter,
        recorder: Recorder,
        notify: HookCaller,
        saver: Saver,
        val: Any,
    ) -> Callable[[int], None] | None:
        if val is None:
            return None
        refuse_one_pass(val, "val")
        engine, feed = assembly.engine, make_evaluation_feed(val, assembly)

        def evaluate_now(step: int) -> None:
            notify("on_validation_start", step)
            saver.page.note(Phase.EVALUATING)
            with recorder.measure("evaluation", step), engine.autocast:
                result = evaluate(self.task, engine.spread, feed, assembly.world, step)
            self.history.evaluations.append(result)
            saver.score(result)
            reporter.evaluation(result, feed.length)
            notify("on_validation_end", result)

        return evaluate_now


def kind_of_loop(config: RunConfig) -> type[Loop]:
    """Micro-batches one by one, or through a pipeline together."""
    if config.parallel.pp == 1:
        return Loop
    from drivetrain.train.pipelined_loop import PipelinedLoop  # torch's pipelines, and only then

    return PipelinedLoop


def _stateful_hooks(hooks: Sequence[Hook]) -> dict[str, Any]:
    """A hook that has a state is saved with the run."""
    return {
        f"hook.{index}.{type(hook).__name__}": hook
        for index, hook in enumerate(hooks)
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
    }
