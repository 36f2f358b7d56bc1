"""Keep your loop: Trainer's loop (`loop.py`), driven by your own code.

    loop = drivetrain.prepare(model, optimizer, train_set, config)
    for step in loop.steps():                # one optimizer step on one global batch
        for x, y in step:                    # this rank's micro-batches, on its device
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()

Batches, random streams, loss weights, learning rate and records are the same as with Trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.config.load import resolve
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, NonFiniteLoss, Problem
from drivetrain.core.intercept import OwnLoopMet, is_intercepting
from drivetrain.core.stateful import Stateful
from drivetrain.data.batches import MicroBatch
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.feed import Turn
from drivetrain.data.keys import SCRIPT, fold, turn_seed
from drivetrain.data.seeding import seed_model
from drivetrain.data.sources import source_from
from drivetrain.record.session import Phase
from drivetrain.train.assemble import Assembly, assemble
from drivetrain.train.attempt import Attempt, evaluate_all, open_attempt
from drivetrain.train.ema import EMA
from drivetrain.train.evaluate import set_training
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.loop import Loop
from drivetrain.train.numerics.bitwise_mode import process_settings
from drivetrain.train.optimization.given import GivenOptimizer
from drivetrain.train.optimization.own_schedule import LRSchedule, ScheduleFactory, as_factory
from drivetrain.train.own_records import OwnRecords
from drivetrain.train.own_weights import OwnWeights
from drivetrain.train.refusals import check_loss, check_plain, check_prepared
from drivetrain.train.saving.leaving import is_left_on_purpose
from drivetrain.train.saving.run_state import RunState
from drivetrain.train.saving.weights import FinalWeights
from drivetrain.train.setup.feeds import evaluation_feeds, validation_sources
from drivetrain.train.setup.model import Prebuilt
from drivetrain.train.several.optimizers import as_one
from drivetrain.train.task import Loss, LossAndParts, MetricsFunction, Task, Total, split
from drivetrain.train.watch.leftovers import Gradients, Updates
from drivetrain.train.watch.non_finite import has_whole_loss_on_host
from drivetrain.train.watch.remedies import change_settings, for_any_cause


def prepare(
    model: nn.Module | Callable[[], nn.Module] | Mapping[str, Any],
    optimizer: torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer]
    | None,
    train: Any,
    config: RunConfig | ResolvedConfig | Mapping[str, Any],
    stateful: Mapping[str, Stateful] | None = None,
    scheduler: LRScheduler | LRSchedule | ScheduleFactory | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    ema: EMA | None = None,
) -> KeptLoop:
    """Distribute a model and its data for your own training loop.

    For several models, pass dicts with the same names:
    `prepare({"G": G, "D": D}, {"G": opt_g, "D": opt_d}, …)`; `backward` and `step` then take a
    name.

    Args:
        model: A model, which starts from rank 0's weights on every rank, or a function that builds
            one, called under the config's seed.
        optimizer: Built on the model's parameters; None: the optimizer that the config describes.
        train: A dataset, DataLoader or iterable.
        config: The run's config.
        stateful: Objects with `state_dict` and `load_state_dict`, saved and restored with the run.
        scheduler: A torch LR scheduler built on the optimizer, an `LRSchedule` that sets when it is
            stepped, or a function `scheduler(optimizer, total_steps)` that builds one. It is
            stepped by `loop.step()`, a ReduceLROnPlateau by `loop.evaluate()`, and saved with the
            run.
        tokenizer: As in `Task`.
        ema: Keeps a moving average of the weights.
    """
    from drivetrain.train.several.loop import SeveralLoop, task_of_several  # imports this module

    if is_intercepting():
        raise OwnLoopMet
    check_prepared(model, optimizer, train, config, stateful)
    check_plain(optimizer=optimizer, train=train, scheduler=scheduler)
    loop: type[KeptLoop] = KeptLoop
    if isinstance(model, Mapping):
        loop, task = SeveralLoop, task_of_several(model, optimizer, scheduler, _not_asked)
    else:
        task = _task_of_one(model, optimizer, scheduler)
    task = replace(task, tokenizer=tokenizer)
    resolved = resolve(config)
    if resolved.config.parallel.pp > 1:
        rule = "your own loop takes micro-batches one at a time, a pipeline all at once"
        problem = Problem("parallel.pp", rule, "use Trainer", resolved.config.parallel.pp)
        raise ConfigError([problem])
    replays = resolved.config.sentinel.replay_every_steps
    if replays is not None:
        key, rule = "sentinel.replay_every_steps", "your own loop cannot be replayed"
        raise ConfigError([Problem(key, rule, "leave it out, or use Trainer", replays)])
    with process_settings(resolved.config):
        assembly = assemble(task, resolved, source_from(train, resolved.config.data))
    if assembly.config.fault_tolerance == "live":
        rule = "your own loop cannot repeat a step when a replica is lost"
        problem = Problem("fault_tolerance", rule, "use Trainer, or start without --live", "live")
        raise ConfigError([problem])
    if ema is not None:
        ema.attach(assembly)
    return loop(assembly, stateful or {})


def _task_of_one(
    model: nn.Module | Callable[[], nn.Module], optimizer: Any, scheduler: Any
) -> Task:
    factory = Prebuilt(model) if isinstance(model, nn.Module) else model
    task = Task(model=factory, loss=_not_asked)
    for what, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if isinstance(given, Mapping):
            rule, remedy = "is a dict, but there is only one model", "pass the models as a dict too"
            raise ConfigError([Problem(what, rule, remedy, ", ".join(map(str, given)))])
    if optimizer is not None:
        if not isinstance(factory, Prebuilt):
            raise TypeError("an optimizer needs the model it was built on, not a function")
        task = replace(task, optimizer=GivenOptimizer(as_one(optimizer), factory.model))
    if scheduler is not None:
        task = replace(task, schedule=as_factory(scheduler))
    return task


def _refuse_name(what: str, name: str | None) -> None:
    if name is not None:
        rule, remedy = "there is only one model, and it has no name", f"leave it out of {what}()"
        raise ConfigError([Problem(what, rule, remedy, repr(name))])


def _not_asked(*given: Any) -> Any:
    raise AssertionError(f"the user's loop builds the model and computes the loss ({given})")


NOT_CALLED = (
    "was not called for this micro-batch: `continue` or a branch skipped it, or loss.backward() or "
    "accelerator.backward(loss) was called in its place; call it once for every micro-batch"
)


_TASK = Task(model=_not_asked, loss=_not_asked)


class KeptLoop(OwnRecords, OwnWeights):
    """The training loop that `prepare` returns: `steps`, `backward`, `step` and `evaluate`."""

    def __init__(self, assembly: Assembly, stateful: Mapping[str, Stateful]) -> None:
        self.assembly = assembly
        self.history = History()
        self._engine = assembly.engine
        self._run = RunState(assembly, self.history, stateful)
        self._at = self._run.at
        self._attempt: Attempt | None = None
        """Set once the loop has begun."""
        self._loop: Loop | None = None
        """Set while the loop is running."""
        self._has_ended = False
        """Whether the run is over: all of its steps are made, or the script left its loop."""
        self._micro: MicroBatch | None = None
        self._turns_are_done = False
        self._is_backward_done = False
        """Whether `backward` was called in the current step."""
        self._is_after_step = False
        """Whether data and weights are at the same step."""
        self._looks_at_losses = has_whole_loss_on_host(assembly)
        self._unreported: list[tuple[str, EvaluationResult, int | None]] = []
        """Evaluations made before the loop began."""
        self._gradients = Gradients(self._engine.optimizer, self._engine.spread)
        self._updates = Updates(self._engine.optimizer, self._engine.spread)
        self._inner = self._engine.spread.inner
        """The user's own module, whose mode applies whatever wraps it."""
        self._stream = fold(assembly.config.seed, SCRIPT)
        self._num_stretches = 0
        """How often the script's own code has come between micro-batches in the current step."""
        self._may_say_eval = True
        """Whether a model that is trained in eval mode has not been announced yet."""

    @property
    def model(self) -> Any:
        """The distributed model to call in training; of several models, use `loop.model["G"]`."""
        return self._engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, holding the distributed model's parameters."""
        return self._engine.optimizer

    @property
    def is_main(self) -> bool:
        """True on the one rank that should print and write."""
        return self.assembly.world.is_main

    @property
    def config(self) -> RunConfig:
        """The run's config, including the values chosen automatically."""
        return self.assembly.config

    @property
    def step_number(self) -> int:
        """Completed steps, including those of earlier attempts; the current step is not counted."""
        return self._at.step

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a stream whose length is unknown."""
        return self.assembly.total_steps

    @property
    def epoch(self) -> int:
        """Epoch of the current step, counted from 0."""
        return max(0, self._at.epoch)

    @property
    def ends_epoch(self) -> bool:
        """True after the `step()` that completes an epoch. RuntimeError for a stream."""
        plan = self.assembly.feed.plan
        if plan.length is None:
            raise RuntimeError(
                "the end of a stream's epoch is known only when the next one begins: compare "
                "loop.epoch with the previous step's, or evaluate every N steps"
            )
        return self._is_after_step and plan.is_between_epochs(self._at.step)

    def steps(self) -> Iterator[Any]:
        """Iterate over the run's steps; each is an iterable of this rank's micro-batches.

        With several models, you can iterate over a step as often as you like.
        """
        if self._has_ended:  # another attempt would only say that the run is finished
            self._say_again()
            return
        began_s, assembly, config = time.perf_counter(), self.assembly, self.assembly.config
        with (
            process_settings(config),
            open_attempt(assembly, self.history, self._run, began_s) as self._attempt,
        ):
            loop = self._loop = Loop.of(self._attempt, _TASK, self._on)
            for model in self._models():
                set_training(model)
            weights = self._final_weights(self._attempt)
            is_left = False
            try:
                with weights.after_not_saved(), self._attempt.training():
                    self._report_earlier(self._attempt)
                    self._say_what_starts_anew(self._attempt)
                    before = self._at.step
                    try:
                        for turns in loop.steps(assembly.total_steps, config.num_train_epochs):
                            before = self._at.step
                            self._is_after_step = False
                            self._num_stretches = 0
                            self._seed_script(before)
                            with self._updates.scripts_turn():
                                yield self._micro_batches(loop, turns)
                            self._check_whole()
                    except GeneratorExit:
                        # the script left its loop: allowed after a step, a failure during one
                        if self._at.step == before or not is_left_on_purpose():
                            raise
                        is_left = True
                        self._left_early(loop, self._attempt)
                if not is_left:
                    weights.write()
                self._attempt.end()
                self._has_ended = True
            finally:
                self._loop = None
                self.history.total_time = time.perf_counter() - began_s

    def _say_again(self) -> None:
        """Announce a second call of `steps`, as by a loop over epochs that was kept."""
        why = f" ({self._at.stopped})" if self._at.stopped else ""
        if self._attempt is None:
            return
        self._attempt.reporter.say_once(
            f"warning: loop.steps() was called again after the run's end at step {self._at.step}"
            f"{why}: it yields nothing; one call makes the steps of all epochs, so remove the loop "
            "over epochs around it (`if loop.ends_epoch:` after loop.step() is an epoch's end)"
        )

    def _on(self, event: str, *given: Any) -> None:  # noqa: ARG002 - a Trainer's hooks get it
        if event == "on_before_optimizer_step":
            self._gradients.before_update()

    def _models(self) -> Iterable[nn.Module]:
        """Return the models that are trained."""
        return [self._engine.spread.inner]

    def _final_weights(self, attempt: Attempt) -> FinalWeights:
        return FinalWeights(self.assembly, attempt.saver, attempt.directory.checkpoints)

    def _check_whole(self) -> None:
        """Raise if the step is incomplete. One model: the loop itself checks for `step()`."""

    def _say_what_starts_anew(self, attempt: Attempt) -> None:
        """After a resume, say once what a checkpoint cannot hold: the script's own variables."""
        if self._at.step and not self._run.keeps_objects and not attempt.saver.ends:
            attempt.reporter.say(
                "the script starts from its top: variables of its own (a best score, a counter) "
                "begin anew, unless prepare(stateful=…) saves them"
            )

    def _report_earlier(self, attempt: Attempt) -> None:
        for one in self._unreported:
            attempt.reporter.evaluation(*one)

    def _left_early(self, loop: Loop, attempt: Attempt) -> None:
        loop.timer.done(self._at.step)
        self._at.stopped = "the script left its loop"
        attempt.saver.ended(self._at.stopped)
        loop.finish()

    def _micro_batches(self, loop: Loop, turns: Iterator[Turn]) -> Iterable[Any]:
        self._turns_are_done = self._is_backward_done = False
        for micro, batch, is_last in loop.micro_batches(turns):
            self._micro = micro
            with self._engine.micro_batch(micro, is_last=is_last), self._engine.autocast:
                yield batch
                if not is_last:
                    self._gradients.before_next_micro_batch()
            if self._micro is not None:
                raise RuntimeError(f"loop.backward(loss) {NOT_CALLED}")
        self._turns_are_done = True
        self._seed_script(self._at.step)

    def _seed_script(self, step: int) -> None:
        """Let what the script draws between micro-batches depend on the step, not on the rank.

        The same numbers come again at any number of ranks and after a resume.
        """
        seed = turn_seed(self._stream, step, self._num_stretches)
        seed_model(seed, self.assembly.world.device)
        self._num_stretches += 1

    def backward(self, loss: Loss | LossAndParts, name: str | None = None) -> None:
        """Compute the micro-batch's gradients; call this instead of `loss.backward()`.

        Args:
            loss: A mean over the micro-batch's samples, or a `Total`; or `(loss, {"ce": ce})`,
                whose parts are recorded with it.
            name: With several models, the one that the loss trains. Other models that the loss
                depends on get no gradients.
        """
        _refuse_name("backward", name)
        if self._micro is None:
            if self._is_backward_done and not self._turns_are_done:
                raise RuntimeError(
                    "loop.backward(loss) was called twice for this micro-batch: sum the losses and "
                    "call it once"
                )
            raise RuntimeError("call backward() inside `for batch in step`, once per batch")
        check_loss(loss)
        if not self._inner.training:
            self._say_eval("the model")
        if self._looks_at_losses:
            self._check(split(loss)[0])
        self._gradients.before_backward()
        with torch.autocast(self._engine.world.device.type, enabled=False):
            self._engine.backward(loss, self._micro)
        self._gradients.after_backward()
        self._micro, self._is_backward_done = None, True

    @property
    def _current(self) -> int:
        """Number of the step under way, counted from 1."""
        return self._at.step + 1

    def _say_eval(self, which: str) -> None:
        """Announce once that a model is trained in eval mode: it was in train mode at the start."""
        if not self._may_say_eval:
            return
        self._may_say_eval = False
        self._under_way("backward").reporter.say(
            f"warning: {which} is in eval mode at backward in step {self._current}: it is "
            "trained without dropout, and batch norm's statistics stay as they are; call "
            "model.train() after an evaluation of your own (loop.evaluate does it)"
        )

    def _check(self, loss: Loss) -> None:
        value = (loss.sum if isinstance(loss, Total) else loss).item()
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"train/loss = {value} at step {self._current} on rank "
                f"{self._engine.world.rank}: the loss is not finite; "
                f"{for_any_cause(change_settings(self.assembly))}"
            )

    def step(self, name: str | None = None) -> None:
        """Clip the gradients, set the learning rate, step the optimizer and clear the gradients.

        Call this instead of `optimizer.step()`, `optimizer.zero_grad()` and `scheduler.step()`.
        With several models, `name` selects one.
        """
        _refuse_name("step", name)
        if self._loop is None or not self._turns_are_done:
            raise RuntimeError("step() was called before all of the step's batches were used")
        self._gradients.before_step()
        with self._updates.runs_turn():
            self._loop.move()
        self._turns_are_done = self._is_backward_done = False
        self._is_after_step = True
        self._log(self._loop)

    def _log(self, loop: Loop) -> None:
        """Log before the script's own lines about the step, which may read `history`.

        A resumed run logs its first step, too: a script that prints `history.losses[-1]` every few
        steps would find an empty list only after a resume, and end there.
        """
        if self.history.resumed_step and not self.history.steps:
            loop.log()
        else:
            loop.log_if_due()

    def stop(self, reason: str) -> None:
        """End the run early, after the current step: it is saved and complete.

        Any rank may call this. All ranks stop after the same step: at once if this follows an
        evaluation, otherwise when they next synchronize, at most about a second later.
        """
        self._under_way("stop").saver.ask_to_end(reason)

    def _under_way(self, what: str) -> Attempt:
        if self._loop is None or self._attempt is None:
            raise RuntimeError(f"call {what}() inside `for step in loop.steps()`")
        return self._attempt

    def _assembled(self, what: str) -> Assembly:  # noqa: ARG002 - it always is
        return self.assembly

    def save(self) -> None:
        """Save a checkpoint of the step just completed. Call on every rank, after `step()`."""
        if self._loop is None or not self._is_after_step:
            raise RuntimeError("call save() after step(), inside `for step in loop.steps()`")
        self._loop.log()
        with self._updates.runs_turn():  # to read an optimizer's state, torch may step it
            self._loop.saver.save_now()

    def evaluate(
        self, val: Any, metrics: MetricsFunction, summarize: Any = None
    ) -> EvaluationResult:
        """Evaluate every sample of `val` once; the result is the same at any number of ranks.

        Args:
            val: Validation data, or a dict of several sets.
            metrics: As in `Task`.
            summarize: As in `Task`.
        """
        world, config = self.assembly.world, self.assembly.config
        feeds = evaluation_feeds(validation_sources(val, config), world, config)
        task = replace(_TASK, metrics=metrics, summarize=summarize)
        self.assembly.page.note(Phase.EVALUATING)
        if self._loop is not None and self._is_after_step:
            self._loop.log()  # the step's line comes before its evaluation
        if self._attempt is None:
            result = self._evaluate_before(task, feeds)
        elif self._loop is None:
            result = self._attempt.evaluate_after(task, feeds)
        else:
            with self._updates.runs_turn():
                result = self._attempt.evaluate(task, feeds)
        self.assembly.page.note(Phase.STEPPING)
        return result

    def _evaluate_before(self, task: Task, feeds: Mapping[str, EvaluationFeed]) -> EvaluationResult:
        """Evaluate before the loop; the result is recorded when the run begins."""
        result = evaluate_all(
            task, feeds, self.assembly, self._at.step, lambda *one: self._unreported.append(one)
        )
        self.history.evaluations.append(result)
        return result
