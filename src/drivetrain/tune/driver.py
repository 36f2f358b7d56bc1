"""The driver: does what `decide` says, and writes down what comes of it.

It holds nothing that is not in the journal or in a trial's directory. A trial that runs when the
driver dies runs on; the next driver finds its job and waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drivetrain.core import locks
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.tune import decide, sampling
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Ended, Journal, Promoted
from drivetrain.tune.settings import Study
from drivetrain.tune.trial_run import MOST_RESUMES, Runner

LOCK = "driver.lock"
_POLL_S = 0.2
_SETTLE_S = 3.0
"""A launcher that was just being started when its job was killed has its lock, or is gone."""


@dataclass
class Driver:
    """One driver of a study, until it is over or this process ends."""

    study: Study
    runner: Runner
    num_parallel: int
    say: Callable[[str], None] = lambda _: None
    _running: dict[Work, int] = field(default_factory=dict)
    """How often each was resumed here."""
    _lost_s: dict[Work, float] = field(default_factory=dict)
    """When it was seen that a job was gone before its end."""

    def run(self) -> Ended | None:
        """The winner, once nothing is left to do."""
        self.study.path.mkdir(parents=True, exist_ok=True)
        lock = locks.hold(self.study.path / LOCK)
        if lock is None:
            host, pid = locks.last_holder(self.study.path / LOCK) or ("", 0)
            rule = f"is being driven by process {pid} on {host}"
            remedy = "wait for it, stop it, or give another directory"
            raise ConfigError([Problem("--study", rule, remedy, str(self.study.path))])
        with lock:
            return self._run()

    def _run(self) -> Ended | None:
        journal, settings = Journal(self.study.path), self.study.settings
        mirror = sampling.Mirror(self.study)
        self._refuse_hopeless(journal)
        self._adopt(journal)
        while True:
            mirror.catch_up(journal.state)
            if settings.schedule == "eager":
                for work in decide.newly_promoted(settings, journal.state):
                    journal.write(Promoted(work.trial, work.rung))
            if not self._start_one(journal):
                if not self._running:
                    break
                if not self._collect(journal):
                    time.sleep(_POLL_S)
        return decide.winner(settings, journal.state)

    def _adopt(self, journal: Journal) -> None:
        """What was running when the last driver ended; even if it is more than may run now."""
        for work in decide.ready(self.study.settings, journal.state):
            status = self.runner.status(journal.state.asked[work.trial], work.rung)
            if status is not None and not status.state.is_over:
                self._running[work] = 0
                self.say(f"trial {work.trial}: still running; adopted")

    def _start_one(self, journal: Journal) -> bool:
        """Whether there was something to do: a run to start, or a trial to ask for."""
        if len(self._running) >= self.num_parallel:
            return False
        settings, state = self.study.settings, journal.state
        for work in decide.ready(settings, state):
            if work not in self._running:
                self._running[work] = 0
                asked = state.asked[work.trial]
                if self.runner.status(asked, work.rung) is None:  # else it has ended unseen
                    if state.last(work.trial) is not None:
                        step = settings.rungs[work.rung - 1]
                        self.say(f"trial {work.trial}: among the best at step {step}; goes on")
                    self.runner.start(asked, work.rung)
                return True
        if decide.next_trial(settings, state) is None:
            return False
        asked = sampling.ask(self.study, state)
        journal.write(asked)
        shown = " ".join(sampling.values_as_words(asked.values))
        self.say(f"trial {asked.trial}: {shown}")
        return True

    def _collect(self, journal: Journal) -> bool:
        """Whether a job has ended."""
        for work in sorted(self._running):
            asked = journal.state.asked[work.trial]
            status = self.runner.status(asked, work.rung)
            if status is not None and not status.state.is_over:
                continue
            resumed = self._running[work]
            end = None if status is None else self.runner.result(work, status, resumed)
            if end is None:
                self._resume(work, journal)
                continue
            journal.write(end)
            del self._running[work]
            self._say_end(end)
            self._refuse_hopeless(journal)
            return True
        return False

    def _resume(self, work: Work, journal: Journal) -> None:
        """Once nothing of it is left: a launcher that still runs would refuse another."""
        lost_s = self._lost_s.setdefault(work, time.monotonic())
        if time.monotonic() - lost_s < _SETTLE_S or self.runner.is_leaving(work.trial):
            return
        del self._lost_s[work]
        self._running[work] += 1
        if self._running[work] > MOST_RESUMES:
            raise DrivetrainError(
                f"trial {work.trial} was interrupted {MOST_RESUMES} times; see "
                f"{self.study.run_dir(work.trial)}, and run the same command again"
            )
        self.say(f"trial {work.trial}: interrupted; resuming it")
        self.runner.start(journal.state.asked[work.trial], work.rung)

    def _say_end(self, end: Ended) -> None:
        settings = self.study.settings
        if end.outcome == "done":
            self.say(f"trial {end.trial}: step {end.step}  {settings.metric} {end.value:.6g}")
        else:
            self.say(f"trial {end.trial}: {end.outcome.replace('_', ' ')}: {end.reason}")

    def _refuse_hopeless(self, journal: Journal) -> None:
        """A first generation of which nothing came is a mistake in the script or the space."""
        settings, state = self.study.settings, journal.state
        first = [state.last(trial) for trial in settings.generation_of(0)]
        if all(each is not None and each.outcome == "failed" for each in first):
            reason = first[0].reason if first[0] else ""
            raise DrivetrainError(f"all of the first {len(first)} trials failed: {reason}")
