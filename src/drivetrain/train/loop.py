"""The loop.

Its contract, for every strategy, data source and number of ranks:

    for step in run:                                     # one optimizer step on one global batch
        on_train_epoch_start                             # when the step opens an epoch
        on_train_batch_start
        for micro-batch in this rank's turns:
            seed the random streams by (seed, step, micro-batch index)
            loss = task.loss(model, batch)               # under the run's precision
            backward, weighted by the batch's samples    # gradients are reduced in the last turn
        complete, correct and clip the gradients
        on_before_optimizer_step
        set the learning rate of this step; optimizer step; zero_grad; step a scheduler
        on_train_batch_end
        every logging_steps:   reduce the open steps' losses over ranks; record; on_log
        every evaluation:      every validation sample once; on_validation_start / _end
        save if it is time or the best so far; stop if a rank asked for it and all ranks agreed
        on_train_epoch_end                               # when the step closes an epoch

`Trainer.fit` drives it with `run`. A user's own loop (`KeptLoop`) drives the same loop from outside
with `steps`, `micro_batches` and `move`, with the user's code between them.

Nothing here depends on how the model is distributed: that is up to the engine and the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from drivetrain.data.batches import MicroBatch
from drivetrain.data.device import to_device
from drivetrain.data.feed import Feed, Turn
from drivetrain.record.recorder import Recorder
from drivetrain.train.attempt import Attempt
from drivetrain.train.engine import Engine
from drivetrain.train.history import StepMetrics
from drivetrain.train.saving.run_state import Position
from drivetrain.train.saving.saver import Saver
from drivetrain.train.task import Task
from drivetrain.train.watch.logged_steps import LoggedSteps
from drivetrain.train.watch.replay import Replay
from drivetrain.train.watch.step_timer import StepTimer

Notify = Callable[..., None]


@dataclass
class Loop:
    """The loop's parts and its position."""

    task: Task
    engine: Engine
    feed: Feed
    recorder: Recorder
    notify: Notify
    logging_steps: int
    evaluate_every: int | None
    evaluate: Callable[[int], None] | None
    """None without validation data."""
    report: Callable[[list[StepMetrics]], None]
    logged: LoggedSteps
    saver: Saver
    at: Position
    replay: Replay | None = None

    @property
    def timer(self) -> StepTimer:
        """The timer of the steps."""
        return self.engine.timer

    @classmethod
    def of(
        cls,
        attempt: Attempt,
        task: Task,
        notify: Notify,
        evaluate: Callable[[int], None] | None = None,
    ) -> Self:
        """Return the loop of an attempt."""
        assembly, config = attempt.assembly, attempt.assembly.config
        return cls(
            task=task,
            engine=assembly.engine,
            feed=assembly.feed,
            recorder=attempt.recorder,
            notify=notify,
            logging_steps=config.record.logging_steps,
            evaluate_every=config.evaluation.every_steps,
            evaluate=evaluate,
            report=attempt.reporter.steps,
            logged=LoggedSteps.of(assembly, attempt.history, attempt.reporter.say),
            saver=attempt.saver,
            at=attempt.saver.at,
            replay=Replay.of(config, assembly.engine.spread, assembly.world, attempt.reporter.say),
        )

    def run(self, total_steps: int | None, num_epochs: int | None) -> None:
        """Train until the last step or epoch."""
        for turns in self.steps(total_steps, num_epochs):
            self._one_step(turns)

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """Yield each step's turns; the caller computes with them, then calls `move`.

        The work between two steps and after the last one is done here.
        """
        timer = self.timer
        # ask the feed only for steps that will be made: it counts them
        for turns in () if self.saver.ends else self.feed.steps(total_steps, num_epochs):
            timer.begin()
            before = self.at.step
            yield turns
            if self.at.step == before:
                raise RuntimeError("step() was not called: call it once per global batch")
            try:
                self._after_step()
            finally:  # record every completed step, even if it was the last
                timer.done(self.at.step)
            if self.saver.ends:
                break
        self.finish()

    def finish(self) -> None:
        """Finish after the last step, also if the run ended early."""
        self.log()
        self.timer.finish()
        self.logged.end(self.at.step)
        self._evaluate()
        self.engine.compare_copies(self.at.step)
        self.saver.finish()
        self._turn_epoch(-1)

    def micro_batches(self, turns: Iterator[Turn]) -> Iterator[tuple[MicroBatch, Any, bool]]:
        """Yield a step's micro-batches on this rank's device, and whether it is the last turn."""
        engine, timer, accumulation = self.engine, self.timer, self.feed.plan.accumulation
        for position in range(accumulation):
            asked = timer.now()
            micro, batch = next(turns)
            timer.waited_for_data(asked)
            if position == 0:
                self._open_step(micro)
            if engine.wants(micro):
                yield micro, to_device(batch, engine.world.device), position == accumulation - 1

    def move(self) -> None:
        """Update the weights, when all gradients are computed, and count the step."""
        step, timer = self.at.step, self.timer
        timer.optimizing()
        self.engine.complete_gradients(step)
        self.notify("on_before_optimizer_step", step + 1)
        self.engine.step(step)
        timer.ended()
        self.at.step = step + 1
        self.notify("on_train_batch_end", step + 1)

    def _after_step(self) -> None:
        self.log_if_due()
        if self._ends_a_stretch():
            self._evaluate()
        self.saver.after_step(self.at.step, self.log)

    def _ends_a_stretch(self) -> bool:
        """True if it is time to evaluate: every `evaluate_every` steps, or after an epoch."""
        if self.evaluate_every is not None:
            return self.at.step % self.evaluate_every == 0
        plan = self.feed.plan
        return plan.length is not None and plan.is_between_epochs(self.at.step)

    def _one_step(self, turns: Iterator[Turn]) -> None:
        self._go_through(turns)
        self.move()

    def _go_through(self, turns: Iterator[Turn]) -> None:
        """Run forward and backward of this rank's micro-batches."""
        step, replay = self.at.step + 1, self.replay
        is_due = replay is not None and replay.is_due(step)
        for position, (micro, batch, is_last) in enumerate(self.micro_batches(turns)):
            if is_due and replay is not None and position == 0:
                replay.compute(partial(self._compute, micro, batch, is_last))
            else:
                self._compute(micro, batch, is_last)
        if is_due and replay is not None:
            replay.settle(step)

    def _compute(self, micro: MicroBatch, batch: Any, is_last: bool, is_real: bool = True) -> None:
        """Compute one micro-batch; if it is not real (a replay), its loss is not recorded."""
        engine = self.engine
        if not is_real:
            is_last = engine.spread.reduces_in_backward
        with engine.micro_batch(micro, is_last=is_last):
            if engine.expert_load is not None:
                engine.expert_load.counts &= is_real
            with engine.autocast:
                loss = self.task.loss(engine.model, batch)
            engine.backward(loss, micro, is_noted=is_real)

    def _open_step(self, first: MicroBatch) -> None:
        self._turn_epoch(first.epoch)
        self.notify("on_train_batch_start", self.at.step + 1)

    def _turn_epoch(self, epoch: int) -> None:
        if epoch == self.at.epoch:
            return
        if self.at.epoch >= 0:
            if self.evaluate_every is None:  # a stream's epoch ends when the next one begins
                self._evaluate()
            self.engine.learning_rate.after("epoch")
            self.notify("on_train_epoch_end", self.at.epoch)
        if epoch >= 0:
            self.notify("on_train_epoch_start", epoch)
        self.at.epoch = epoch

    def _evaluate(self) -> None:
        if self.evaluate is not None and self.at.step != self.at.evaluated_at:
            self.log()
            self.evaluate(self.at.step)
            self.at.evaluated_at = self.at.step

    def log_if_due(self) -> None:
        """Log after every `logging_steps`-th step."""
        if self.at.step % self.logging_steps == 0:
            self.log()

    def log(self) -> None:
        """Reduce the open steps' metrics over the ranks, record and show them."""
        metrics = self.engine.meter.collect()
        if not metrics:
            return
        self.timer.caught_up()
        self.engine.agree_on_rate()
        self.report(metrics)
        self.notify("on_log", metrics)
        self.logged.note(metrics)
