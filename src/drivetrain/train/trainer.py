"""Trainer: run a whole training in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.config.load import resolve
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.intercept import Intercepted, is_intercepting
from drivetrain.core.stateful import Stateful
from drivetrain.data.sources import Source, source_from
from drivetrain.record.rank_logging import share_console
from drivetrain.train.assemble import Assembly, assemble
from drivetrain.train.attempt import Attempt, open_attempt
from drivetrain.train.early_stopping import EarlyStopping
from drivetrain.train.evaluate import predict, set_training
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.hooks import Hook, HookCaller
from drivetrain.train.loop import Loop
from drivetrain.train.numerics.bitwise_mode import process_settings
from drivetrain.train.optimization.own_schedule import refuse_unstepped
from drivetrain.train.own_records import OwnRecords
from drivetrain.train.own_weights import OwnWeights
from drivetrain.train.saving.run_state import RunState
from drivetrain.train.saving.weights import FinalWeights
from drivetrain.train.setup.feeds import evaluation_feed, evaluation_feeds, validation_sources
from drivetrain.train.task import Task
from drivetrain.train.watch.non_finite import NonFiniteWatch, has_whole_loss_on_host
from drivetrain.train.watch.remedies import change_settings
from drivetrain.train.watch.requested import requested_hooks


class Trainer(OwnRecords, OwnWeights):
    """Train a task as the config describes, on any number of ranks.

    The training's numbers depend on the config, not on the number of ranks. After `fit`, `model`
    holds this rank's part of the trained model, and `<run_dir>/checkpoints` the whole model
    (weights.pt, or weights/ if it is large).

    Args:
        task: The model, its loss and, optionally, how it is optimized and evaluated.
        config: The run's config: a mapping of keys, or a RunConfig or ResolvedConfig.
        hooks: Called at fixed points of the loop, in this order.
        stateful: Objects with `state_dict` and `load_state_dict`, saved and restored with the run.
    """

    def __init__(
        self,
        task: Task,
        config: RunConfig | ResolvedConfig | Mapping[str, Any],
        hooks: Sequence[Hook] = (),
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        _check_given(task, hooks)
        self.task = task
        self.resolved = resolve(config)
        identity = detect()
        share_console(self.config.record.log_ranks, identity.rank, identity.world_size)
        own = () if task.adapter is None else (task.adapter,)
        self.hooks = (*own, *hooks, *requested_hooks())
        self.stateful = {**_stateful_hooks(self.hooks), **(stateful or {})}
        """Objects with state_dict and load_state_dict, saved and restored with the run."""
        self.history = History()
        self.assembly: Assembly | None = None
        self._attempt: Attempt | None = None
        """The last attempt that trained to its end."""
        self._open: Attempt | None = None
        """The attempt in progress."""
        self.run_dir: Path | None = None
        self.attempt = 0
        """Which attempt of the run this is, counted from 1; set by fit()."""

    @property
    def config(self) -> RunConfig:
        """The config as resolved so far; fit() fills in the values chosen automatically."""
        return self.resolved.config

    @property
    def model(self) -> nn.Module:
        """The user's own module. Available once fit() has started."""
        if self.assembly is None:
            raise RuntimeError("fit() builds the model: call it first")
        return self.assembly.engine.spread.inner

    @property
    def is_main(self) -> bool:
        """True on the one rank that should print and write."""
        return self.assembly.world.is_main if self.assembly is not None else detect().is_main

    @property
    def step_number(self) -> int:
        """Completed steps, including those of earlier attempts."""
        attempt = self._open or self._attempt
        return 0 if attempt is None else attempt.saver.at.step

    @property
    def epoch(self) -> int:
        """Epoch of the current step, counted from 0."""
        attempt = self._open or self._attempt
        return 0 if attempt is None else max(0, attempt.saver.at.epoch)

    def fit(self, train: Any = None, val: Any = None) -> History:
        """Train, evaluate and record; return the run's history.

        Resumes from the newest checkpoint of the run, if there is one.

        Args:
            train: A dataset, DataLoader or iterable. May be left out if the task brings its own
                data, as a Lightning datamodule does.
            val: Validation data of the same kinds, or a dict of several sets, whose names become
                prefixes of their metrics (`news/loss`).
        """
        if train is None:
            train, own_val = self.task.adapter.data() if self.task.adapter else (None, None)
            val = own_val if val is None else val
        if train is None:
            rule, remedy = "has no training data", "pass a Dataset, a DataLoader or an iterable"
            raise ConfigError([Problem("fit()", rule, remedy, has_value=False)])
        source = source_from(train, self.config.data)
        if is_intercepting():
            raise Intercepted(self.task, self.resolved, source.batch_of_largest)
        validation = validation_sources(val, self.config, read_often=True)
        began_s = time.perf_counter()
        with process_settings(self.config):
            assembly = assemble(self.task, self.resolved, source)
            if val is None:
                refuse_unstepped(assembly.engine.learning_rate)
            self.assembly, self.resolved, self.history = assembly, assembly.resolved, History()
            self._refuse_no_validation(val)
            HookCaller(self, self.hooks)("on_setup")
            run = RunState(assembly, self.history, self.stateful)
            with open_attempt(assembly, self.history, run, began_s) as attempt:
                self.run_dir, self.attempt = attempt.directory.path, attempt.number
                self._open = attempt
                try:
                    self._train(attempt, validation)
                finally:
                    self._open = None
                self.history.total_time = time.perf_counter() - began_s
                attempt.end()
        self._attempt = attempt
        return self.history

    def stop(self, reason: str) -> None:
        """End the run early, after the current step: it is saved, evaluated and complete.

        Any rank may call this. All ranks stop after the same step: at once if this follows an
        evaluation, otherwise when they next synchronize, at most about a second later.
        """
        self._under_way("stop").saver.ask_to_end(reason)

    def say_once(self, message: str) -> None:
        """Print a line on rank 0 while fit() trains, unless the same line was printed before."""
        if self._open is not None:
            self._open.reporter.say_once(message)

    def _refuse_no_validation(self, val: Any) -> None:
        """Raise ConfigError if a setting needs evaluations that this run does not make."""
        if val is None and EarlyStopping.of(self.config.early_stopping) is not None:
            rule, remedy = "fit() has no validation data", "pass some, or leave this out"
            raise ConfigError([Problem("early_stopping", rule, remedy, has_value=False)])
        metric = self.config.checkpoint.keep_best
        if metric is None or self.assembly is None:
            return
        is_stream = self.assembly.feed.plan.length is None
        rule, remedy = "", ""
        if val is None:
            rule, remedy = "fit() has no validation data", "pass some, or leave this out"
        elif is_stream and self.config.evaluation.every_steps is None:
            rule = "the end of a stream's epoch is known only in the step after it"
            remedy = "set evaluation.every_steps"
        if rule:
            raise ConfigError([Problem("checkpoint.keep_best", rule, remedy, metric)])

    def evaluate(self, val: Any) -> EvaluationResult:
        """Evaluate the trained model on other data and record the result. Call on every rank."""
        attempt = self._fitted("evaluate")
        sources = validation_sources(val, self.config)
        feeds = evaluation_feeds(sources, attempt.assembly.world, attempt.assembly.config)
        return attempt.evaluate_after(self.task, feeds)

    def predict(self, data: Any, function: Callable[[nn.Module, Any], Any]) -> Any:
        """Return the outputs of `function(model, batch)` for every sample, in the data's order.

        `function` returns a tensor with one row, or a list with one item, per sample of the batch,
        or a dict or tuple of these. Call on every rank; ranks other than 0 get None.
        """
        assembly = self._fitted("predict").assembly
        source = source_from(data, self.config.data)
        feed = evaluation_feed(source, assembly.world, assembly.config, whole=True)
        with assembly.engine.autocast, assembly.engine.evaluated_weights():
            return predict(function, assembly.engine.spread, feed, assembly.world)

    def _under_way(self, what: str) -> Attempt:
        if self._open is None:
            raise RuntimeError(f"call {what}() in a hook, while fit() is training")
        return self._open

    def _assembled(self, what: str) -> Assembly:
        if self.assembly is None:
            raise RuntimeError(
                f"{what}() needs the model that fit() builds: call it in a hook, or after fit()"
            )
        return self.assembly

    def _fitted(self, what: str) -> Attempt:
        if self._attempt is None:
            raise RuntimeError(f"{what}() uses the model that fit() has trained: call fit() first")
        return self._attempt

    def _train(self, attempt: Attempt, validation: Mapping[str, Source]) -> None:
        """Train, then write the whole model's weights."""
        assembly = attempt.assembly
        weights = FinalWeights(assembly, attempt.saver, attempt.directory.checkpoints)
        notify = HookCaller(self, self.hooks)
        loop = self._loop(attempt, notify, validation)
        with weights.after_not_saved(), attempt.training():
            self._run(loop, notify, assembly.total_steps)
        weights.write()

    def _run(self, loop: Loop, notify: HookCaller, total_steps: int | None) -> None:
        try:
            notify("on_fit_start")
            set_training(loop.engine.spread.inner)
            loop.run(total_steps, self.config.num_train_epochs)
            notify("on_fit_end")
        except BaseException as error:
            notify("on_exception", error)
            raise

    def _loop(self, attempt: Attempt, notify: HookCaller, validation: Mapping[str, Source]) -> Loop:
        assembly = attempt.assembly
        evaluate = self._evaluator(attempt, notify, validation)
        loop = kind_of_loop(assembly.config).of(attempt, self._watched(attempt), notify, evaluate)
        if assembly.config.fault_tolerance != "live":
            return loop
        from drivetrain.train.live.training import go_live  # imports torchft

        return go_live(loop, assembly.source, assembly.config)

    def _watched(self, attempt: Attempt) -> Task:
        """Return the task, its loss watched for NaN and infinity where that costs nothing."""
        assembly, parallel = attempt.assembly, attempt.assembly.config.parallel
        if not has_whole_loss_on_host(assembly):
            return self.task
        watch = NonFiniteWatch(
            rank=assembly.world.rank,
            folder=attempt.directory.attempt(attempt.number) / "non_finite",
            step=lambda: attempt.saver.at.step,
            sample_ids=assembly.feed.sample_ids,
            micro_batch_size=assembly.feed.plan.micro_batch_size,
            inner=assembly.engine.spread.inner,
            num_losses=lambda: assembly.engine.meter.num_losses,
            is_whole=not parallel.traits.shards and parallel.cp == 1,
            settings=change_settings(assembly),
        )
        return watch.over(self.task)

    def _evaluator(
        self, attempt: Attempt, notify: HookCaller, validation: Mapping[str, Source]
    ) -> Callable[[int], None] | None:
        if not validation:
            return None
        feeds = evaluation_feeds(validation, attempt.assembly.world, attempt.assembly.config)

        def evaluate_now(step: int) -> None:
            notify("on_validation_start", step)
            notify("on_validation_end", attempt.evaluate(self.task, feeds))

        return evaluate_now


def kind_of_loop(config: RunConfig) -> type[Loop]:
    """Return the class of the loop: micro-batches one by one, or together in a pipeline."""
    if config.parallel.pp == 1:
        return Loop
    from drivetrain.train.pipelined_loop import PipelinedLoop  # imports torch's pipelines

    return PipelinedLoop


def _check_given(task: Any, hooks: Any) -> None:
    if not isinstance(task, Task):
        remedy = "pass Task(model=…, loss=…); prepare() takes a model as it is"
        raise ConfigError([Problem("Trainer", "needs a Task first", remedy, type(task).__name__)])
    listed = isinstance(hooks, Sequence)
    strangers = [each for each in hooks if not isinstance(each, Hook)] if listed else [hooks]
    if strangers:
        rule = "must be a list of drivetrain.Hook instances"
        remedy = "write class Mine(Hook) and pass hooks=[Mine()]"
        kind = getattr(strangers[0], "__name__", type(strangers[0]).__name__)
        raise ConfigError([Problem("Trainer.hooks", rule, remedy, kind)])


class _HookState:
    """A hook's state; adds a hint to the error if it cannot be loaded."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._hook.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._hook.load_state_dict(state)
        except AttributeError as error:
            error.add_note(
                "state is loaded before on_fit_start: create objects that have one in on_setup"
            )
            raise


def _stateful_hooks(hooks: Sequence[Hook]) -> dict[str, Any]:
    """Return the hooks that have a state, by the names they are saved under."""
    return {
        f"hook.{index}.{type(hook).__name__}": _HookState(hook)
        for index, hook in enumerate(hooks)
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
    }
