"""Saver: when a run saves, what it goes on from, and what happens when it is asked to stop.

The loop calls `after_step` and nothing else. Whether a step saves is the same on every rank: it
follows from the step's number, or was agreed at a pulse.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.checkpointer import Checkpointer, Saved
from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.interval import Interval, best_interval
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.place import place_at
from drivetrain.checkpoint.state import Stateful, TrainingState, Value
from drivetrain.core.errors import ConfigError, Preempted, Problem
from drivetrain.data.stream import StreamFeed
from drivetrain.parallel.communication.auto import Trial
from drivetrain.parallel.live_world import LiveWorld
from drivetrain.parallel.local_sgd import agreed_weights
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import RUN_DIR, Phase, ProgressPage
from drivetrain.record.stop_request import StopRequest
from drivetrain.train.assemble import Assembly
from drivetrain.train.history import EvaluationResult, History
from drivetrain.train.saving.own_states import own_states
from drivetrain.train.saving.pulse import Pulse

_RETRY_AFTER_S = 10.0
_LAST_TRIES, _PAUSE_S = 3, 2.0
Say = Callable[[str], None]


def _silent(text: str) -> None:
    """Before the run has begun there is nobody to say it to."""


@dataclass
class Position:
    """Where a run stands."""

    step: int = 0
    """Steps done."""
    epoch: int = -1
    evaluated_at: int = -1
    """The step of the last evaluation."""


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
        self._stateful = stateful
        self.page = ProgressPage.of_this_rank(assembly.world.identity.local_rank)
        self.at = Position()
        self._stop = StopRequest()
        self._recorder: Recorder | None = None
        self._directory: RunDirectory | None = None
        self._say: Say = _silent
        self._checkpointer: Checkpointer | None = None
        self._pulse: Pulse | None = None
        self._next_save: int | None = None
        self._failed_at_s: float | None = None
        self._last_saved = -1
        self._is_writer = False
        self._is_from_another_run = False
        self._save_s, self._beside_s = 0.0, 0.0
        self._stall_s = 0.0
        self._manifest: Manifest | None = None

    def open(self, directory: RunDirectory) -> int:
        """Go on from the newest good checkpoint, if there is one; the attempt's number."""
        root = self._rule.directory or str(directory.checkpoints)
        self._directory = directory
        checkpointer = Checkpointer(
            place_at(root), self._rule, self._world, self._assembly.config.parallel.strategy
        )
        self._checkpointer = checkpointer
        state = self._state()
        if self._is_anothers(checkpointer, directory):
            raise ConfigError(
                [
                    Problem(
                        "checkpoint.directory",
                        "holds checkpoints of another run",
                        "go on with that run (--run-dir, or checkpoint.resume_from), or give "
                        "another directory",
                        root,
                    )
                ]
            )
        self._manifest = checkpointer.load_newest(state)
        if self._manifest is None and self._rule.resume_from is not None:
            self._manifest = self._load_from(self._rule.resume_from, checkpointer, state)
            self._is_from_another_run = True
        for result in self._history.evaluations:
            self.score(result)
        if isinstance(self._world, LiveWorld):
            return directory.next_attempt()  # claimed by whoever comes to write, and when
        attempt = self._claim(checkpointer, state, directory)
        if self._world.is_main:
            checkpointer.clean()
        return attempt

    def _claim(
        self, checkpointer: Checkpointer, state: TrainingState, directory: RunDirectory
    ) -> int:
        """Own the run, from what was loaded; unless an attempt that still lived has dropped it."""
        while True:
            attempt = checkpointer.claim(self.at.step, directory.next_attempt())
            manifest = self._manifest
            if manifest is None or self._is_from_another_run:
                return attempt
            if checkpointer.still_there(manifest.folder):
                return attempt
            self._manifest = checkpointer.load_newest(state)

    def _is_anothers(self, checkpointer: Checkpointer, directory: RunDirectory) -> bool:
        """Whether a run that has only just begun would go on from, and write among, others'."""
        if self._rule.directory is None or RUN_DIR in os.environ:
            return False
        if self._rule.resume_from == self._rule.directory:
            return False
        is_new = self._world.is_main and directory.next_attempt() == 1
        return bool(self._world.agree("x" if is_new and checkpointer.good() else ""))

    def begin(self, recorder: Recorder, say: Say) -> None:
        """The run is about to step."""
        self._recorder, self._say = recorder, say
        trial = own_states(self._assembly.engine).get("communication")
        if isinstance(trial, Trial):
            trial.when_settled = self._note_compression
            if trial.choice:
                self._note_compression(trial.choice, "as in this run's earlier attempt")
        self._stop.listen()
        step = self.at.step
        self._last_saved = step if self._manifest is not None else -1
        self._pulse = Pulse(self._world, step)
        every = self._rule.every_steps
        if isinstance(every, int):
            self._next_save = step - step % every + every
        if self._manifest is not None:
            say(f"resumed: after step {step}, from {self._manifest.folder}")

    def after_step(self, step: int, log: Callable[[], None]) -> None:
        """Between two steps: save if it is time, stop if somebody asks for it.

        `log` brings metrics up to date first: what is saved has been logged, what is redone not.
        """
        self.page.note(Phase.STEPPING, step)
        if self._checkpointer is None or self._pulse is None:
            return
        self._note(self._checkpointer.poll())
        wishes = self._pulse.at(
            step, stop=self._stop.received is not None, save=self._wants_retry()
        )
        # not only at the very step: a live replica may have been healed to beyond it
        is_due = self._next_save is not None and step >= self._next_save
        if wishes is not None:
            if wishes.stop:
                log()
                self._stop_here(step)
            is_due |= wishes.save and self._rule.every_steps is not None
            if self._rule.every_steps == "auto" and self._next_save is None:
                self._schedule(step, wishes.step_s)
        if is_due:
            log()
            with self._stalling():
                self.save(step)

    def take_stall(self) -> float:
        """Seconds that steps have waited for saves since the last call."""
        seconds, self._stall_s = self._stall_s, 0.0
        return seconds

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._stall_s += time.perf_counter() - began_s

    def save(self, step: int) -> None:
        """Save now, and settle when to save next. A collective call."""
        if self._checkpointer is None or step == self._last_saved:
            return
        if isinstance(self._world, LiveWorld) and not self._take_turn(step):
            return
        self.page.note(Phase.SAVING)
        with agreed_weights(self._assembly.engine.spread):
            before = self._checkpointer.save(
                self._state(), step, self._position(step), contents=self._rule.contents
            )
        self._note(before)
        self._last_saved = step
        if before is None or before.step != step or not before.problem:
            self._failed_at_s = None  # a save that was not waited for makes up for the one before
        self._settle_next(step)
        self.page.note(Phase.STEPPING)

    def _settle_next(self, step: int) -> None:
        """A number of steps on; with `auto` it is settled at the next pulse."""
        every = self._rule.every_steps
        self._next_save = step + every if isinstance(every, int) else None

    def _take_turn(self, step: int) -> bool:
        """Among live replicas the first seat writes; a new holder of it begins an attempt."""
        if not self._world.is_main:
            self._is_writer = False
            self._settle_next(step)
            return False
        if not self._is_writer and self._checkpointer is not None:
            self._checkpointer.claim(step)
            self._is_writer = True
        return True

    def finish(self) -> None:
        """The last step is done: what it came to is kept."""
        if self._rule.every_steps is None:
            return
        began_s = time.perf_counter()
        for _ in range(_LAST_TRIES):
            if self._save_and_wait(self.at.step):
                break
            time.sleep(_PAUSE_S)
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._recorder is not None:
            self._recorder.spans(self.at.step, ("last_save", began_s, time.perf_counter()))

    def close(self) -> None:
        """Stop listening, whatever happened."""
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
        with self._stalling():
            is_saved = self._rule.every_steps is not None and self._save_and_wait(step)
        signal = self._stop.received or "a signal on another rank"
        took_s = time.perf_counter() - began
        outcome = f"was saved in {took_s:.1f} s" if is_saved else "was not saved"
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
        has_failed = bool(self._world.sum_floats([float(self._failed_at_s is not None)])[0])
        if has_failed:
            self._last_saved = -1
        return not has_failed

    def _wants_retry(self) -> bool:
        failed_s = self._failed_at_s
        return failed_s is not None and time.perf_counter() - failed_s > _RETRY_AFTER_S

    def _note(self, saved: Saved | None) -> None:
        """Write down how a save went; a failed one is a warning and a retry."""
        if saved is None or self._recorder is None:
            return
        if saved.problem:
            self._failed_at_s = time.perf_counter()
            self._recorder.instant("save_failed", step=saved.step, error=saved.problem)
            if self._world.is_main:
                self._say(
                    f"step {saved.step} could not be saved ({saved.problem}); training goes on, "
                    "and it is tried again"
                )
            return
        self._save_s, self._beside_s = saved.blocked_s, saved.beside_s
        self._recorder.instant(
            "saved", step=saved.step, blocked_s=saved.blocked_s, beside_s=saved.beside_s
        )

    def _schedule(self, step: int, step_s: float) -> None:
        """Settle the next save from rank 0's figures."""
        facts = [0.0] * 4
        if self._world.is_main:
            facts = [self._save_s, self._beside_s, *self._history_of_failures()]
        save_s, beside_s, failures, running_s = self._world.sum_floats(facts)
        interval = best_interval(save_s, step_s, int(failures), running_s, beside_s)
        # the first save comes early: it shows what a save costs, and that one can be made
        steps = interval.steps if save_s else min(interval.steps, max(10, int(2 / step_s)))
        self._next_save = step + steps
        if self._world.is_main and save_s:
            self._explain(interval)

    def _history_of_failures(self) -> tuple[float, float]:
        return self._directory.failures() if self._directory is not None else (0.0, 0.0)

    def _explain(self, interval: Interval) -> None:
        self._choose("checkpoint.every_steps", interval.steps, interval.why)

    def _choose(self, path: str, value: Any, why: str) -> None:
        """What is settled while the run is under way, into run.yaml."""
        self._resolved = self._resolved.choose(path, value, why)
        if self._world.is_main and self._directory is not None:
            self._directory.write_run_yaml(self._resolved.to_yaml())

    def _note_compression(self, name: str, why: str) -> None:
        """How the trial of `communication.compression: auto` has ended."""
        self._choose("communication.compression", name, why)
        if self._world.is_main:
            self._say(f"communication: {'plain gradients' if name == 'none' else name}; {why}")

    def _state(self) -> TrainingState:
        engine, feed = self._assembly.engine, self._assembly.feed
        common: dict[str, Stateful] = {
            "run": Value(self._get_run, self._set_run),
            "feed": feed,
        }
        own = {**self._stateful, **own_states(engine)}
        if engine.scaler is not None:
            common["scaler"] = engine.scaler
        if isinstance(feed, StreamFeed):
            own["dataset"] = Value(
                lambda: feed.dataset_state, lambda state: setattr(feed, "dataset_state", state)
            )
        spread, world = engine.spread, self._world
        parts = (spread.inner, engine.optimizer, world.rank, common, own, world.is_first_copy)
        if spread.own_step is not None:
            return GatheredState(*parts, keeper=spread.own_step)
        return TrainingState(*parts)

    def _get_run(self) -> dict[str, Any]:
        return {
            "at": asdict(self.at),
            "evaluations": [
                [result.step, dict(result.metrics), result.num_samples]
                for result in self._history.evaluations
            ],
        }

    def _set_run(self, run: dict[str, Any]) -> None:
        for name, value in run["at"].items():
            setattr(self.at, name, value)
        self._history.resumed_step = self.at.step
        self._history.evaluations = [EvaluationResult(*entry) for entry in run["evaluations"]]

    def _position(self, step: int) -> dict[str, Any]:
        return {"step": step, "epoch": self.at.epoch, "samples": self._samples(step)}

    def _samples(self, step: int) -> int | None:
        """Used so far, where an epoch's length is known."""
        plan = self._assembly.feed.plan
        if plan.length is None or plan.steps_per_epoch is None:
            return None
        epochs, rest = divmod(step, plan.steps_per_epoch)
        return epochs * plan.length + rest * plan.global_batch_size

    def _load_from(
        self, address: str, checkpointer: Checkpointer, state: TrainingState
    ) -> Manifest:
        """Another run's newest checkpoint: its directory, or that of its checkpoints."""
        for root in (address, f"{address.rstrip('/')}/checkpoints"):
            manifest = checkpointer.elsewhere(place_at(root)).load_newest(state)
            if manifest is not None:
                return manifest
        raise ConfigError(
            [
                Problem(
                    "checkpoint.resume_from",
                    "there is no good checkpoint",
                    "give a run's directory, or its checkpoints'; `drivetrain checkpoint ls` lists",
                    str(Path(address)) if "://" not in address else address,
                )
            ]
        )
