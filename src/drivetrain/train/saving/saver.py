"""Saver: when a run saves, what it goes on from, and what happens when it is asked to stop.

The loop calls `after_step` and nothing else. Whether a step saves is the same on every rank: it
follows from the step's number, or was agreed at a pulse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.checkpoint.checkpointer import Checkpointer, Saved
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.place import place_at
from drivetrain.core.errors import NotSaved, Preempted
from drivetrain.core.stateful import Stateful
from drivetrain.parallel.live_world import LiveWorld
from drivetrain.parallel.model import Choice
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import Phase, ProgressPage
from drivetrain.record.stop_request import StopRequest
from drivetrain.train.assemble import Assembly
from drivetrain.train.contract import agree_on, contract_of
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.saving.origin import Origin
from drivetrain.train.saving.pulse import Pulse
from drivetrain.train.saving.run_state import RunState
from drivetrain.train.saving.timetable import Timetable

_LAST_TRIES, _PAUSE_S = 3, 2.0
Say = Callable[[str], None]


def _silent(text: str) -> None:
    """Before the run has begun there is nobody to say it to."""


class Saver:
    """One attempt's saving."""

    def __init__(
        self, assembly: Assembly, history: History, stateful: Mapping[str, Stateful]
    ) -> None:
        self._assembly = assembly
        self._resolved = assembly.resolved
        self._rule = assembly.config.checkpoint
        self._history = history
        self._world = assembly.world
        self._timer = assembly.engine.timer
        self.page = ProgressPage.of_this_rank(assembly.world.identity.local_rank)
        self._run = RunState(assembly, history, stateful)
        self.at = self._run.at
        self._stop = StopRequest()
        self._recorder: Recorder | None = None
        self._directory: RunDirectory | None = None
        self._say: Say = _silent
        self._checkpointer: Checkpointer | None = None
        self._origin: Manifest | None = None
        self._note_on_origin = ""
        self._pulse: Pulse | None = None
        self._timetable = Timetable(self._rule.every_steps, assembly.world)
        self._last_saved = -1
        self._newest_saved: int | None = None
        """A step of which there is a checkpoint; `_last_saved` may still be on its way."""
        self._problem = ""
        self._is_writer = False
        self._attempt = 0

    def open(self, directory: RunDirectory) -> int:
        """Go on from the newest good checkpoint, if there is one; the attempt's number."""
        root = self._rule.directory or str(directory.checkpoints)
        self._directory = directory
        assembly = self._assembly
        contract = contract_of(assembly.config, assembly.source, assembly.made, self._world)
        agree_on(contract, self._world)
        checkpointer = Checkpointer(
            place_at(root), self._rule, self._world, assembly.config.parallel.strategy, contract
        )
        self._checkpointer = checkpointer
        origin = Origin(checkpointer, self._rule, directory, self._run)
        origin.load(self._world)
        self._origin, self._note_on_origin = origin.manifest, origin.note
        assembly.engine.ends_at(assembly.total_steps)  # another batch size: after other steps
        for result in self._history.evaluations:
            self.score(result)
        if isinstance(self._world, LiveWorld):
            self._attempt = directory.next_attempt()  # claimed by whoever comes to write, and when
            return self._attempt
        self._attempt = origin.claim()
        self._origin = origin.manifest
        if self._world.is_main:
            checkpointer.clean()
        return self._attempt

    def begin(self, recorder: Recorder, say: Say) -> None:
        """The run is about to step."""
        self._recorder, self._say = recorder, say
        self._timer.recorder = recorder
        self._assembly.engine.spread.when_settled(self._note_choice)
        if self._checkpointer is not None and not self._world.accelerator.is_cpu:
            self._assembly.engine.before_change = self._before_change
        self._stop.listen()
        step = self.at.step
        self.page.note(Phase.STARTING, step)  # a failure in the first step comes after this one
        if self._origin is not None:
            self._last_saved = self._newest_saved = step
        self._pulse = Pulse(self._world, step, self._timer.take_mean_s)
        self._timetable.begin(step)
        if self._origin is not None:
            say(f"resumed: after step {step}, from {self._origin.folder}")
            for change in self._checkpointer.changes if self._checkpointer is not None else ():
                say(f"changed since: {change}")
        elif self._note_on_origin:
            say(self._note_on_origin)

    def after_step(self, step: int, log: Callable[[], None]) -> None:
        """Between two steps: save if it is time, stop if somebody asks for it.

        `log` brings metrics up to date first: what is saved has been logged, what is redone not.
        """
        self.page.note(Phase.STEPPING, step)
        if self._checkpointer is None or self._pulse is None:
            return
        self._note(self._checkpointer.poll())
        wishes = self._pulse.at(
            step, stop=self._stop.received is not None, save=self._timetable.wants_retry
        )
        is_due = self._timetable.is_due(step)
        if wishes is not None:
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

    def _before_change(self) -> None:
        """The weights are about to move: what is still being copied of them comes first."""
        if self._checkpointer is not None and self._checkpointer.is_copying:
            since = self._timer.now()
            self._checkpointer.before_change()
            self._timer.held(since)

    def save(self, step: int) -> None:
        """Save now, and settle when to save next. A collective call."""
        if self._checkpointer is None or step == self._last_saved:
            return
        if isinstance(self._world, LiveWorld) and not self._take_turn(step):
            return
        self.page.note(Phase.SAVING)
        with self._assembly.engine.spread.shown_weights() as are_taken_back:
            before = self._checkpointer.save(
                self._run.whole(), step, self._run.position(step), contents=self._rule.contents
            )
            if are_taken_back:
                self._checkpointer.before_change()
        self._note(before)
        self._last_saved = step
        if before is None or before.step != step or not before.problem:
            self._timetable.forgive()  # a save that was not waited for makes up for the one before
        self._timetable.settle_next(step)
        self.page.note(Phase.STEPPING)

    def _take_turn(self, step: int) -> bool:
        """Among live replicas the first seat writes; a new holder of it begins an attempt."""
        if not self._world.is_main:
            self._is_writer = False
            self._timetable.settle_next(step)
            return False
        if not self._is_writer and self._checkpointer is not None:
            self._checkpointer.claim(step)
            self._is_writer = True
        return True

    def finish(self) -> None:
        """The last step is done: what it came to is kept, or the run has not succeeded."""
        if self._rule.every_steps is None:
            return
        began_s = time.perf_counter()
        is_saved = self._insist()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._recorder is not None:
            self._recorder.spans(self.at.step, ("last_save", began_s, time.perf_counter()))
        if not is_saved:
            raise NotSaved(self._world.agree(self._what_is_missing()))

    def _insist(self) -> bool:
        """Whether the last step was saved, at last."""
        for left in reversed(range(_LAST_TRIES)):
            if self._save_and_wait(self.at.step):
                return True
            time.sleep(_PAUSE_S if left else 0.0)
        return False

    def _what_is_missing(self) -> str:
        """In rank 0's words: where it writes alone, the others know of no problem."""
        newest = self._newest_saved
        there_is = "there is no checkpoint" if newest is None else f"the newest is of step {newest}"
        return (
            f"step {self.at.step} could not be saved ({self._problem}); {there_is}; see that "
            "checkpoints can be written, and start the same command again to go on from it"
        )

    def close(self) -> None:
        """Stop listening, whatever happened."""
        self._timer.end_early()
        self._stop.close()
        self.page.note(Phase.ENDED)
        self.page.close()

    def score(self, result: EvaluationResult) -> None:
        """Remember what `keep_best` goes by."""
        name = self._rule.keep_best
        if name is not None and name in result.metrics and self._checkpointer is not None:
            self._checkpointer.scores[result.step] = result.metrics[name]

    def _stop_here(self, step: int) -> None:
        """All ranks, at the same step: save, and leave with the code that means "resume me"."""
        began = time.perf_counter()
        with self._timer.saving():
            is_saved = self._rule.every_steps is not None and self._save_and_wait(step)
        signal = self._stop.received or "a signal on another rank"
        took_s = time.perf_counter() - began
        outcome = f"was saved in {took_s:.1f} s" if is_saved else "was not saved"
        if not is_saved and self._newest_saved is not None:
            outcome += f" (the newest that was is {self._newest_saved})"
        raise Preempted(
            f"stopped by {signal} after step {step}, which {outcome}; "
            "start the same command again to go on"
        )

    def _save_and_wait(self, step: int) -> bool:
        """Whether there is a checkpoint of this step now; the same answer on every rank."""
        self.save(step)
        if self._checkpointer is None:
            return False
        self.page.note(Phase.SAVING)
        self._note(self._checkpointer.wait())
        has_failed = bool(self._world.sum_floats([float(self._timetable.has_failed)])[0])
        if has_failed:
            self._last_saved = -1
        return not has_failed

    def _note(self, saved: Saved | None) -> None:
        """Write down how a save went; a failed one is a warning and a retry."""
        if saved is None or self._recorder is None:
            return
        self._timetable.note(saved)
        if saved.problem:
            self._problem = saved.problem
            self._recorder.instant("save_failed", step=saved.step, error=saved.problem)
            if self._world.is_main:
                self._say(
                    f"step {saved.step} could not be saved ({saved.problem}); training goes on, "
                    "and it is tried again"
                )
            return
        self._newest_saved = saved.step
        self._recorder.instant(
            "saved", step=saved.step, blocked_s=saved.blocked_s, beside_s=saved.beside_s
        )

    def _schedule(self, step: int, step_s: float) -> None:
        """Settle the next save, and say why then."""
        failures = 0.0, 0.0
        if self._world.is_main and self._directory is not None:
            failures = self._directory.failures()
        interval = self._timetable.choose_interval(step, step_s, failures)
        if interval is not None and self._world.is_main:
            self._choose("checkpoint.every_steps", interval.steps, interval.why)

    def _choose(self, path: str, value: Any, why: str) -> None:
        """What is settled while the run is under way, into run.yaml."""
        self._resolved = self._resolved.choose(path, value, why)
        if self._world.is_main and self._directory is not None:
            self._directory.write_run_yaml(self._resolved.to_yaml(), self._attempt)

    def _note_choice(self, choice: Choice) -> None:
        """A key that was left open is settled by the run's steps."""
        self._choose(choice.key, choice.value, choice.why)
        if self._world.is_main:
            self._say(choice.said)
