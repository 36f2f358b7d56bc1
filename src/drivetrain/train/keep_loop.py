"""Keep your loop: the same engine as Trainer's, called from a loop of your own.

    loop = drivetrain.prepare(model, optimizer, train_set, config)
    for step in loop.steps():                # one optimizer step on one global batch
        for x, y in step:                    # this rank's micro-batches, on its device
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()

Batches, random streams, loss weights, learning rate and records are what Trainer's would be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.config.load import resolve
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, NonFiniteLoss, Problem
from drivetrain.core.stateful import Stateful
from drivetrain.data.batches import MicroBatch
from drivetrain.data.device import to_device
from drivetrain.data.feed import Turn
from drivetrain.record.recorder import Recorder
from drivetrain.record.session import Phase
from drivetrain.train.assemble import (
    Assembly,
    Prebuilt,
    assemble,
    make_evaluation_feed,
)
from drivetrain.train.bitwise_mode import process_settings
from drivetrain.train.evaluate import evaluate
from drivetrain.train.given_optimizer import GivenOptimizer
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.open_run import begin_attempt, open_directory, open_recorder
from drivetrain.train.refusals import check_loss
from drivetrain.train.saving.saver import Saver
from drivetrain.train.task import Loss, MetricsFunction, Task, Total
from drivetrain.train.watch.compiling import announcing
from drivetrain.train.watch.logged_steps import LoggedSteps
from drivetrain.train.watch.non_finite import has_whole_loss_on_host
from drivetrain.train.watch.reporter import Reporter


def prepare(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: torch.optim.Optimizer | None,
    train: Any,
    config: RunConfig | ResolvedConfig | Mapping[str, Any],
    stateful: Mapping[str, Stateful] | None = None,
) -> KeptLoop:
    """Spread a model and line up the data for a loop of your own.

    A model that exists already starts from rank 0's weights on every rank; a function that makes
    one runs under the config's seed. Without an optimizer, AdamW is made from the config. What is
    in `stateful` (anything with state_dict and load_state_dict) is saved and restored with the run.
    """
    factory = Prebuilt(model) if isinstance(model, nn.Module) else model
    task = Task(model=factory, loss=_not_asked)
    if optimizer is not None:
        if not isinstance(factory, Prebuilt):
            raise TypeError("an optimizer needs the model it was made for, not a function")
        task = Task(
            model=factory, loss=_not_asked, optimizer=GivenOptimizer(optimizer, factory.model)
        )
    resolved = resolve(config)
    if resolved.config.parallel.pp > 1:
        rule = "a loop of one's own takes micro-batches one by one, a pipeline all at once"
        problem = Problem("parallel.pp", rule, "use Trainer", resolved.config.parallel.pp)
        raise ConfigError([problem])
    with process_settings(resolved.config):
        assembly = assemble(task, resolved, train)
    if assembly.config.fault_tolerance == "live":
        rule = "a loop of one's own cannot do a step again when a replica is lost"
        problem = Problem("fault_tolerance", rule, "use Trainer, or start without --live", "live")
        raise ConfigError([problem])
    return KeptLoop(assembly, stateful or {})


def _not_asked(model: nn.Module, batch: Any) -> Loss:
    raise AssertionError(f"the loss is computed in the user's loop ({model}, {batch})")


class KeptLoop:
    """What a loop of one's own needs: steps, `backward`, `step`."""

    def __init__(self, assembly: Assembly, stateful: Mapping[str, Stateful]) -> None:
        self.assembly = assembly
        self.history = History()
        self._engine = assembly.engine
        self._saver = Saver(assembly, self.history, stateful)
        self._turns_are_done = False
        self._micro: MicroBatch | None = None
        self._at = self._saver.at
        self._looks_at_losses = has_whole_loss_on_host(assembly)
        self._reporter: Reporter | None = None
        """While the loop goes on."""
        self._open_recorder: Callable[[], Recorder] | None = None
        """From the loop's beginning on."""
        self._unreported: list[tuple[EvaluationResult, int | None]] = []
        """Evaluations before the loop began."""

    @property
    def model(self) -> nn.Module:
        """The spread model: call it in training."""
        return self._engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, on the spread model's parameters."""
        return self._engine.optimizer

    @property
    def is_main(self) -> bool:
        """Whether this rank should speak."""
        return self.assembly.world.is_main

    def steps(self) -> Iterator[Iterator[Any]]:
        """The run's steps; each is an iterator of this rank's micro-batches."""
        assembly, saver = self.assembly, self._saver
        began = time.perf_counter()
        directory = open_directory(assembly)
        self.history.run_dir = directory.path
        attempt = saver.open(directory)
        begin_attempt(assembly, directory, attempt, saver.at.step)
        self._open_recorder = lambda: open_recorder(assembly, directory, attempt)
        self.model.train()
        compiling = announcing(saver.page, self._engine.timer.compiled)
        with process_settings(assembly.config), compiling, self._open_recorder() as recorder:
            recorder.instant("attempt", number=attempt, resumed_step=saver.at.step)
            recorder.spans(saver.at.step, ("start_up", began, time.perf_counter()))
            reporter = self._reporter = Reporter(assembly, recorder, self.history)
            reporter.begin(directory.path)
            saver.begin(recorder, reporter.say)
            for result, length in self._unreported:
                reporter.evaluation(result, length)
            begun = self._at.step
            try:
                for turns in self._all_turns(reporter):
                    begun = self._at.step
                    yield self._micro_batches(turns)
                recorder.instant("run_end", **self.history.summary())
            except GeneratorExit:
                # the script has left its loop: after a step it may, in the middle of one it failed
                if self._at.step == begun:
                    recorder.instant("run_failed", error="left in a step", step=begun)
                    raise
                self._engine.timer.done(self._at.step)
                recorder.instant("run_end", **self.history.summary())
            except BaseException as error:
                recorder.instant("run_failed", error=repr(error), step=self._at.step)
                raise
            finally:
                self._reporter = None
                saver.close()
                reporter.close()
                self.history.total_time = time.perf_counter() - began

    def _all_turns(self, reporter: Reporter) -> Iterator[Iterator[Turn]]:
        """Each step's turns; what belongs between two steps is done here."""
        config, timer, saver = self.assembly.config, self._engine.timer, self._saver
        logged = LoggedSteps.of(config, self.history, reporter.say)

        def log() -> None:
            if metrics := self._engine.meter.collect():
                timer.caught_up()
                reporter.steps(metrics)
                logged.note(metrics)

        for turns in self.assembly.feed.steps(self.assembly.total_steps, config.num_train_epochs):
            timer.begin()
            number = self._at.step
            yield turns
            if self._at.step == number:
                raise RuntimeError("step() was not called: one step per global batch")
            try:
                if self._at.step % config.record.logging_steps == 0:
                    log()
                saver.after_step(self._at.step, log)
            finally:
                timer.done(self._at.step)
        log()
        timer.finish()
        logged.end(self._at.step)
        saver.finish()

    def _micro_batches(self, turns: Iterator[Turn]) -> Iterator[Any]:
        engine, accumulation = self._engine, self.assembly.feed.plan.accumulation
        self._turns_are_done = False
        for position in range(accumulation):
            asked = engine.timer.now()
            micro, batch = next(turns)
            engine.timer.waited_for_data(asked)
            if not engine.wants(micro):
                continue
            self._micro = micro
            with engine.micro_batch(micro, is_last=position == accumulation - 1), engine.autocast:
                yield to_device(batch, engine.world.device)
            if self._micro is not None:
                raise RuntimeError("backward() was not called for this micro-batch")
        self._turns_are_done = True

    def backward(self, loss: Loss) -> None:
        """Add the micro-batch's gradients; a mean over its samples, or a Total."""
        if self._micro is None:
            raise RuntimeError("backward() belongs inside `for batch in step`, once per batch")
        check_loss(loss)
        if self._looks_at_losses:
            self._check(loss)
        with torch.autocast(self._engine.world.device.type, enabled=False):
            self._engine.backward(loss, self._micro)
        self._micro = None

    def _check(self, loss: Loss) -> None:
        value = (loss.sum if isinstance(loss, Total) else loss).item()
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"train/loss = {value} at step {self._at.step + 1} on rank "
                f"{self._engine.world.rank}: no longer a number; look at the batch, lower "
                "optimization.learning_rate or set optimization.max_grad_norm"
            )

    def step(self) -> None:
        """Clip, set the learning rate, move the weights, forget the gradients."""
        if not self._turns_are_done:
            raise RuntimeError("step() was called before all of the step's batches were used")
        self._engine.timer.optimizing()
        self._engine.complete_gradients(self._at.step)
        self._engine.step(self._at.step)
        self._engine.timer.ended()
        self._at.step += 1
        self._turns_are_done = False

    def evaluate(self, val: Any, metrics: MetricsFunction) -> EvaluationResult:
        """Every validation sample once; the same value at any number of ranks."""
        feed = make_evaluation_feed(val, self.assembly)
        task = Task(model=lambda: self.model, loss=_not_asked, metrics=metrics)
        self._saver.page.note(Phase.EVALUATING)
        with self._engine.autocast:
            result = evaluate(task, self._engine.spread, feed, self._engine.world, self._at.step)
        self.history.evaluations.append(result)
        self._saver.score(result)
        self._report(result, feed.length)
        self._saver.page.note(Phase.STEPPING)
        return result

    def _report(self, result: EvaluationResult, length: int | None) -> None:
        """Show and record it; before the loop there is no run to record it in yet."""
        if self._reporter is not None:
            self._reporter.evaluation(result, length)
        elif self._open_recorder is None:
            self._unreported.append((result, length))
        else:
            with self._open_recorder() as recorder:
                reporter = Reporter(self.assembly, recorder, self.history)
                reporter.evaluation(result, length)
                reporter.close()
                recorder.instant("run_end", **self.history.summary())  # it stays the last word
