"""Saver: when a run saves, what it resumes from, and how it stops.

The loop calls only `after_step`. Whether a step is saved is the same on every rank: it follows from
the step's number, or the ranks agreed on it in an exchange (`RankSync`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drivetrain.checkpoint.checkpointer import Saved
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import Storage, storage_at
from drivetrain.core.errors import ConfigError, NotSaved, Preempted, Problem
from drivetrain.core.redaction import clean_text
from drivetrain.core.text import readable_bytes
from drivetrain.parallel.world import LiveWorld, World
from drivetrain.record.plain_run import how_to_resume, is_plain, stopped_script
from drivetrain.record.recorder import Recorder
from drivetrain.record.requests import StopRequest
from drivetrain.record.session import Phase
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import EvaluationResult
from drivetrain.train.optimization.schedule import refuse_unsaved_scheduler
from drivetrain.train.saving.config_record import ConfigRecord
from drivetrain.train.saving.origin import Start, note_score
from drivetrain.train.saving.rank_sync import RankSync
from drivetrain.train.saving.run_state import RunState
from drivetrain.train.saving.timetable import Timetable

_LAST_TRIES, _PAUSE_S = 3, 2.0
_PIECES = "weights-in-pieces"
Say = Callable[[str], None]


def anyones(problem: str, world: World) -> str:
    """Return the first rank's problem, on every rank. A collective call."""
    rank = world.first_with(bool(problem))
    return "" if rank is None else world.agree(problem, speaker=rank)


class Saver:
    """Saves the checkpoints of one attempt."""

    def __init__(
        self,
        assembly: Assembly,
        run: RunState,
        start: Start,
        config: ConfigRecord,
        recorder: Recorder,
        say: Say,
    ) -> None:
        self._engine = assembly.engine
        self._rule = assembly.config.checkpoint
        self._world = assembly.world
        self._timer = assembly.engine.timer
        self._page = assembly.page
        self._run = run
        self.at = run.at
        self._start = start
        self._checkpointer = start.checkpointer
        self._config = config
        self._recorder = recorder
        self._say = say
        self._stop = StopRequest()
        meets_every = assembly.config.record.logging_steps if self._engine.spread.steps_apart else 1
        self._pulse = RankSync(
            self._world, self.at.step, self._timer.take_mean_s, multiple_of=meets_every
        )
        self._timetable = Timetable(self._rule.every_steps, self._world)
        self._newest_saved = self.at.step if start.manifest is not None else None
        """The newest step with a checkpoint; `_last_saved` may still be in progress."""
        self._last_saved = -1 if self._newest_saved is None else self._newest_saved
        self._problem = ""
        self._is_writer = False
        self._max_time_s = assembly.config.max_time_s
        self._stop_at = assembly.config.stop_at_step
        self._max_steps = assembly.config.max_steps
        self._first_step = self.at.step
        self._wanted_end = ""
        """Why this rank wants the run to end."""
        self._ends = False
        self._evaluated_at = -1
        """Step of the last evaluation."""
        self._has_said_size = False
        self._has_said_referred = False
        self._num_evaluations_saved = run.num_evaluations
        self._saved_here = -1
        """The step that this attempt saved last; `_last_saved` may be an earlier attempt's."""

    def begin(self) -> None:
        """Begin, before the first step: handle stop requests and report where the run resumes."""
        self._timer.recorder = self._recorder
        if not self._world.accelerator.is_cpu:
            self._engine.before_change = self._before_change
        self._stop.listen()
        step = self.at.step
        # a failure in the first step counts as one after this step
        self._page.note(Phase.STARTING, step)
        self._timetable.begin(step)
        self._say_where_it_starts()
        if self.at.stopped:
            self._ends = True
            self._say(
                f"this run was stopped after step {step} ({self.at.stopped}); to train further, "
                "start a new run with checkpoint.resume_from"
            )
        elif self._max_time_s is not None and self._run.earlier_s >= self._max_time_s:
            self.ended(self._over)  # uses the saved time: clocks of ranks differ
        elif self._is_there(step):
            self.ended(self._there)

    def _say_where_it_starts(self) -> None:
        manifest, saver = self._start.manifest, self._checkpointer
        used = f"{manifest.folder} is used instead" if manifest else "the run starts at step 0"
        for folder, problem in saver.skipped.items():
            self._say(f"warning: checkpoint {folder} was skipped ({problem}); {used}")
        if manifest is None:
            if self._start.note:
                self._say(self._start.note)
            return
        self._say(f"resumed: after step {self.at.step}, from {manifest.folder}")
        for change in saver.changes:
            self._say(f"changed since: {change}")
        if names := saver.from_first_rank:
            self._say(f"saved with another layout: every rank uses rank 0's {', '.join(names)}")
        if not self._run.keeps_objects:
            refuse_unsaved_scheduler(self._engine.learning_rate)

    def say_if_finished(self, weights: str) -> None:
        """Say that there was nothing left to train, if so; `weights` is where they were written."""
        step = self.at.step
        if self._ends or not step or step > self._first_step:
            return
        longer = "max_steps" if self._max_steps is not None else "num_train_epochs"
        self._say(
            f"this run is already finished (step {step} of {step}): nothing was trained; its "
            f"weights are in {weights}; to train longer, raise {longer}; to start over, use "
            "another run directory"
        )

    def ask_to_end(self, reason: str) -> None:
        """End the run once all ranks know of the request; it is then complete, not interrupted."""
        if isinstance(self._world, LiveWorld):
            rule, remedy = "live replicas cannot agree on an early stop", "set max_steps"
            raise ConfigError([Problem("fault_tolerance", rule, remedy, "live")])
        self._wanted_end = self._wanted_end or reason or "no reason was given"

    @property
    def ends(self) -> bool:
        """True if no step follows; all ranks have agreed on it."""
        return self._ends

    @property
    def _over(self) -> str:
        return f"max_time_s = {self._max_time_s} has elapsed"

    @property
    def _there(self) -> str:
        return (
            f"stop_at_step = {self._stop_at}; to continue, run the same command with a higher one"
        )

    def _is_there(self, step: int) -> bool:
        return self._stop_at is not None and step >= self._stop_at

    def _is_out_of_time(self) -> bool:
        return self._max_time_s is not None and self._run.seconds >= self._max_time_s

    def after_step(self, step: int, log: Callable[[], None]) -> None:
        """Between two steps: save if it is due, stop if requested.

        `log` is called before a save, so that exactly the saved steps have been logged.
        """
        self._page.note(Phase.STEPPING, step)
        self._note(self._checkpointer.poll())
        is_there, is_evaluated = self._is_there(step), self._evaluated_at == step
        if is_there and not is_evaluated:  # every rank knows it without an exchange
            self.ended(self._there)
            return
        wishes = self._pulse.at(
            step,
            finish=bool(self._wanted_end) or (self._is_out_of_time() and self._world.is_main),
            stop=self._stop.received is not None,
            save=self._timetable.wants_retry,
            is_time=is_evaluated,
        )
        # its evaluation may end the run
        if is_there and not (wishes is not None and wishes.finish):
            self.ended(self._there)
            return
        is_due = self._timetable.is_due(step) or self._is_best(step)
        if wishes is not None:
            if wishes.finish:
                self._agree_on_end()
                return  # the loop's end does the rest, including the save
            if wishes.stop:
                log()
                self._stop_here(step)
            is_due |= wishes.save and self._rule.every_steps is not None
            if self._timetable.wants_interval and wishes.step_s:
                self._schedule(step, wishes.step_s)
        if is_due:
            log()
            with self._timer.saving():
                self.save(step)

    def _agree_on_end(self) -> None:
        """End for the first rank's reason. max_time_s is not stored: it can be raised later."""
        rank = self._world.first_with(bool(self._wanted_end))
        reason = self._over
        if rank is not None:
            reason = self.at.stopped = self._world.agree(self._wanted_end, speaker=rank)
        self.ended(reason)

    def ended(self, reason: str) -> None:
        """Mark that no step follows. Called on all ranks at the same step."""
        self._ends = True
        self._run.note_end(reason)
        self._say(f"stopped: after step {self.at.step}: {reason}")

    def _before_change(self) -> None:
        """Wait for a copy in progress before the weights change."""
        if self._checkpointer.is_copying:
            since = self._timer.now()
            self._checkpointer.before_change()
            self._timer.held(since)

    def save(self, step: int) -> None:
        """Save now and schedule the next save. A collective call."""
        if step == self._last_saved and self._is_known(step):
            return
        if isinstance(self._world, LiveWorld) and not self._take_turn(step):
            return
        self._page.note(Phase.SAVING)
        self._engine.compare_copies(step)
        with self._engine.spread.shown_weights() as are_taken_back:
            before = self._checkpointer.save(
                self._run.whole(), step, self._run.position(step), contents=self._rule.contents
            )
            if are_taken_back:
                self._checkpointer.before_change()
        self._note(before)
        self._say_what_is_copied()
        self._last_saved = self._saved_here = step
        self._num_evaluations_saved = self._run.num_evaluations
        if before is None or before.step != step or not before.problem:
            self._timetable.forgive()  # this save makes up for a failed one before
        self._timetable.settle_next(step)
        self._page.note(Phase.STEPPING)

    def _say_what_is_copied(self) -> None:
        """Report once how much host memory a save takes; nothing else shows it."""
        size = self._checkpointer.copied_bytes
        if self._world.is_main and size and not self._has_said_size:
            self._has_said_size = True
            until = "until it is written" if self._world.accelerator.is_cpu else "page-locked, kept"
            self._say(
                f"checkpoints: a save takes {readable_bytes(size)} of host memory on rank 0 for a "
                f"copy ({until})"
            )

    def _is_known(self, step: int) -> bool:
        """True if the step's checkpoint has its evaluation, or it could be added.

        The last step of a run may be saved before it is evaluated. An earlier attempt's checkpoint
        is not changed: then the step is saved again.
        """
        if self._run.num_evaluations == self._num_evaluations_saved:
            return True
        if step != self._saved_here:
            return False
        self._note(self._checkpointer.wait())
        if self._newest_saved == step:  # otherwise it failed and is retried
            self._add_evaluation()
        return True

    def _add_evaluation(self) -> None:
        self._num_evaluations_saved = self._run.num_evaluations
        if not self._world.is_main or self._rule.contents == "weights":
            return
        try:
            self._checkpointer.amend(self.at.step, self._run.evaluated)
        except OSError as error:
            self._say(
                f"warning: the checkpoint of step {self.at.step} lacks its evaluation ({error})"
            )

    def _take_turn(self, step: int) -> bool:
        """True if this live replica saves: the first rank does, and a new one claims an attempt."""
        if not self._world.is_main:
            self._is_writer = False
            self._timetable.settle_next(step)
            return False
        if not self._is_writer:
            self._checkpointer.claim(step)
            self._is_writer = True
        return True

    def finish(self) -> None:
        """Save the last step; NotSaved if that fails."""
        if self._rule.every_steps is None:
            return
        began_s = time.perf_counter()
        is_saved = self._insist()
        self._checkpointer.close()
        self._recorder.spans(self.at.step, ("last_save", began_s, time.perf_counter()))
        if not is_saved:
            raise NotSaved(self._world.agree(self._what_is_missing()))

    def save_now(self) -> None:
        """Save at the script's request, on all ranks; NotSaved if that fails."""
        if self._rule.every_steps is None:
            rule, remedy = "this run saves no checkpoints", "set it to a number, or to auto"
            raise ConfigError([Problem("checkpoint.every_steps", rule, remedy)])
        if not self._insist():
            raise NotSaved(self._world.agree(self._what_is_missing()))

    def _insist(self) -> bool:
        """Save the last step, with retries; True if it was saved."""
        for left in reversed(range(_LAST_TRIES)):
            if self._save_and_wait(self.at.step):
                return True
            time.sleep(_PAUSE_S if left else 0.0)
        return False

    def _what_is_missing(self) -> str:
        """Return rank 0's message: if it writes alone, the others know of no problem."""
        newest = self._newest_saved
        there_is = "no checkpoint exists" if newest is None else f"the newest is from step {newest}"
        return (
            f"step {self.at.step} could not be saved ({self._problem}); {there_is}; make sure that "
            f"checkpoints can be written; {self._next_start}"
        )

    def close(self) -> None:
        """Stop handling requests, also after an error."""
        self._timer.end_early()
        self._stop.close()
        # an error after a step's update, in the script or a hook, is one after that step
        self._page.note(Phase.ENDED, self.at.step)
        self._page.close()

    def pass_on_ctrl_c(self) -> None:
        """Interrupt the script if Ctrl-C came too late to stop the run, which has ended."""
        self._stop.pass_on_ctrl_c()

    def score(self, result: EvaluationResult) -> None:
        """Remember the score for `keep_best`; the best so far is saved at the end of its step."""
        self._evaluated_at = result.step
        note_score(self._checkpointer, self._rule, result)

    def score_after(self, result: EvaluationResult) -> None:
        """Remember the score of an evaluation after the attempt's end."""
        self.score(result)
        if result.step == self._saved_here == self._newest_saved:
            self._add_evaluation()

    def _is_best(self, step: int) -> bool:
        """True if this step was evaluated and is the best so far."""
        best = self._run.best() if self._evaluated_at == step else None
        return best is not None and best.step == step

    def left_out(self) -> set[str]:
        """Return the names of weights that are not saved, but made by the script. Collective."""
        return self._run.left_out()

    @property
    def storage(self) -> Storage:
        """Storage of the checkpoints."""
        return self._checkpointer.storage

    def best_checkpoint(self) -> Manifest | None:
        """Return the checkpoint of the best evaluation, or None. Call on rank 0."""
        best = self._run.best()
        good = self._checkpointer.good() if best is not None else []
        return next((m for m in good if best is not None and m.step == best.step), None)

    @contextmanager
    def last_pieces(self) -> Iterator[tuple[Storage, Manifest | None]]:
        """Yield the storage of a checkpoint of the last step and, on rank 0, its manifest.

        A collective call. The checkpoint is the run's own or, if there is none, a temporary one of
        the weights alone.
        """
        good = self._checkpointer.good() if self._world.is_main else []
        own = next((m for m in good if m.step == self.at.step), None)
        if self._world.agree("x" if own is not None else ""):
            yield self.storage, own
            return
        pieces = self._checkpointer.elsewhere(storage_at(f"{self.storage.address}/{_PIECES}"))
        try:
            with self._engine.spread.shown_weights():
                position = self._run.position(self.at.step)
                done = pieces.save(self._run.whole(), self.at.step, position, contents="weights")
                saved = pieces.wait() or done
            problem = anyones("" if saved is None else saved.problem, self._world)
            if problem:
                raise NotSaved(f"the trained weights could not be written ({problem})")
            yield pieces.storage, next(iter(pieces.good()), None) if self._world.is_main else None
        finally:
            pieces.close()
            if self._world.is_main:
                self.storage.remove(_PIECES)

    def _stop_here(self, step: int) -> None:
        """Save on all ranks at the same step, then exit with the code that requests a resume."""
        began = time.perf_counter()
        with self._timer.saving():
            is_saved = self._rule.every_steps is not None and self._save_and_wait(step)
        signal = self._stop.received or "a signal on another rank"
        took_s = time.perf_counter() - began
        outcome = f"was saved in {took_s:.1f} s" if is_saved else "was not saved"
        if not is_saved and self._newest_saved is not None:
            outcome += f" (the newest saved step is {self._newest_saved})"
        message = f"stopped by {signal} after step {step}, which {outcome}; {self._next_start}"
        if not is_plain():
            raise Preempted(message)
        if self._world.is_main:
            sys.stderr.write(f"{message}\n")
        raise stopped_script(message, self._stop.received or "")

    @property
    def _next_start(self) -> str:
        """What to do to resume."""
        if self._newest_saved is None and self._rule.every_steps is None:
            return "this run saves no checkpoints (checkpoint.every_steps), so it cannot be resumed"
        return how_to_resume(self._config.directory.path)

    def _save_and_wait(self, step: int) -> bool:
        """Save and wait; return on every rank whether there is a checkpoint of this step."""
        self.save(step)
        self._page.note(Phase.SAVING)
        self._note(self._checkpointer.wait())
        has_failed = bool(self._world.sum_floats([float(self._timetable.has_failed)])[0])
        if has_failed:
            self._last_saved = -1
        return not has_failed

    def _note(self, saved: Saved | None) -> None:
        """Record the outcome of a save; a failed one gives a warning and is retried."""
        if saved is None:
            return
        self._timetable.note(saved)
        if saved.problem:
            self._problem = saved.problem
            problem = clean_text(saved.problem)
            self._recorder.instant("save_failed", step=saved.step, error=problem)
            if self._world.is_main:
                self._say(
                    f"step {saved.step} could not be saved ({saved.problem}); training "
                    "continues, and the save is retried"
                )
            return
        self._newest_saved = saved.step
        sizes = {"written_bytes": saved.written_bytes, "referred_bytes": saved.referred_bytes}
        self._recorder.instant(
            "saved",
            step=saved.step,
            blocked_s=saved.blocked_s,
            beside_s=saved.beside_s,
            **{name: size for name, size in sizes.items() if size is not None},
        )
        self._say_what_is_referred(saved)

    def _say_what_is_referred(self, saved: Saved) -> None:
        """Report once how much an incremental save wrote."""
        if not self._world.is_main or not saved.referred_bytes or self._has_said_referred:
            return
        self._has_said_referred = True
        self._say(
            f"checkpoints: step {saved.step} wrote {readable_bytes(saved.written_bytes or 0)}; "
            f"{readable_bytes(saved.referred_bytes)} had not changed and stay in earlier ones"
        )

    def _schedule(self, step: int, step_s: float) -> None:
        """Schedule the next save and record the reason."""
        failures = 0.0, 0.0
        if self._world.is_main:
            failures = self._config.directory.failures()
        interval = self._timetable.choose_interval(step, step_s, failures)
        if interval is not None and self._world.is_main:
            self._config.choose("checkpoint.every_steps", interval.steps, interval.why)
