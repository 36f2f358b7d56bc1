"""The driver: carries out what `decide` says, and records the results.

It holds no state that is not in the journal or in a trial's directory. A trial that is running when
the driver dies continues; the next driver finds its job and waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from drivetrain.core import locks
from drivetrain.core.errors import ConfigError, DrivetrainError, EnvironmentProblem, Problem
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status
from drivetrain.tune import budget, decide, fit, fork, pareto, population, sampling, stopping
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Journal, Promoted
from drivetrain.tune.settings import Study, left_to_chance, left_to_perturb
from drivetrain.tune.trial_run import MOST_RESUMES, SETTLE_S, NoAnswer, Runner

LOCK = "driver.lock"
_AGAIN_S = 10.0
_FORGOTTEN_S = 60.0
"""A restarted scheduler may need a moment until it knows its jobs again."""


@dataclass
class Driver:
    """Drives a study until it is over or this process ends."""

    study: Study
    runner: Runner
    num_parallel: int
    say: Callable[[str], None] = lambda _: None
    planner: fit.Planner | None = None
    """Asked before a trial starts; None: all trials start."""
    spent_by: Callable[[Asked, int], float] | None = None
    """What a trial has spent up to a rung, if the study has a budget."""
    _running: dict[Work, int] = field(default_factory=dict)
    """How often this driver has resumed each."""
    _lost_s: dict[Work, float] = field(default_factory=dict)
    """When a job was first seen to be gone before its end."""
    _is_silent: bool = False
    """Whether the scheduler failed to answer the last time."""
    _has_submitted: bool = False

    def run(self) -> Ended | None:
        """Run until nothing is left to do, and return the winner."""
        self.study.path.mkdir(parents=True, exist_ok=True)
        lock = locks.hold(self.study.path / LOCK)
        if lock is None:
            host, pid = locks.last_holder(self.study.path / LOCK) or ("", 0)
            rule = f"is being driven by process {pid} on {host}"
            remedy = "wait for it, stop it, or use another directory"
            raise ConfigError([Problem("--study", rule, remedy, str(self.study.path))])
        with lock:
            return self._run()

    def _run(self) -> Ended | None:
        journal, settings = Journal(self.study.path), self.study.settings
        mirror, pins = sampling.Mirror(self.study), fork.Pins(self.study)
        self._refuse_hopeless(journal)
        if by_chance := left_to_chance(settings, self.study.space):
            self.say(f"{settings.sampler} draws at random: {', '.join(by_chance)}")
        if perturbed := left_to_perturb(settings, self.study.space):
            self.say(f"pb2 chooses only numbers, and perturbs: {', '.join(perturbed)}")
        if settings.is_measured and settings.asks_by_results:
            self.say(
                f"{settings.sampler} uses measured times: trials may differ when the study is run "
                "again, or on more workers (with --sampler random or qmc they do not)"
            )
        self._adopt(journal)
        num_judged = 0
        while True:
            mirror.catch_up(journal.state)
            self._fork(journal)
            pins.keep(journal.state)
            if settings.schedule == "eager" and len(journal.state.ended) > num_judged:
                num_judged = len(journal.state.ended)
                for work in decide.newly_promoted(settings, journal.state):
                    journal.write(Promoted(work.trial, work.rung))
            if not self._start_one(journal):
                if not self._running:
                    break
                if not self._collect(journal):
                    time.sleep(self.runner.pause_s(len(self._running)))
        return decide.winner(settings, journal.state)

    def _fork(self, journal: Journal) -> None:
        """Record the forks that are due once all members of a population have reached a rung."""
        if not self.study.settings.population:
            return
        while (due := population.next_fork(self.study, journal.state)) is not None:
            asked = fork.begun(self.study, due)
            journal.write(asked)
            shown = " ".join(sampling.values_as_words(asked.values))
            self.say(f"trial {asked.trial}: from trial {due.donor} at step {due.step}: {shown}")

    def _adopt(self, journal: Journal) -> None:
        """Adopt the trials that run already, even if they are more than may run now."""
        for work in decide.ready(self.study.settings, journal.state):
            status = self._status(work, journal)
            if status is not None and not status.state.is_over:
                self._running[work] = 0
                self._has_submitted = True
                now = "still waiting" if status.state is JobState.WAITING else "still running"
                self.say(f"trial {work.trial}: {now}; adopted")

    def _status(self, work: Work, journal: Journal) -> Status | None:
        """The job's status; WAITING if the scheduler does not answer, since the job is not lost."""
        try:
            found = self.runner.status(journal.state.asked[work.trial], work.rung)
        except NoAnswer as error:
            if not self._is_silent:
                self.say(f"{error}; trials continue, and it is asked again")
            self._is_silent = True
            return Status(JobState.WAITING)
        if self._is_silent:
            self.say("the scheduler answers again")
        self._is_silent = False
        return found

    def _start_one(self, journal: Journal) -> bool:
        """Start one run or draw one trial; return whether there was something to do."""
        if len(self._running) >= self.num_parallel:
            return False
        if not self.runner.has_room([work.trial for work in self._running]):
            return False
        settings, state = self.study.settings, journal.state
        for work in decide.ready(settings, state):
            if work not in self._running and self._is_afforded(work, journal):
                if self._is_dropped(work, journal):
                    return True
                self._running[work] = 0
                if self._status(work, journal) is None:  # otherwise it has ended unnoticed
                    if state.last(work.trial) is not None:
                        step = settings.rungs[work.rung - 1]
                        why = "" if settings.population else "among the best at "
                        self.say(f"trial {work.trial}: {why}step {step}; continues")
                    self._submit(work, journal)
                return True
        trial = decide.next_trial(settings, state)
        if trial is None or not self._affords(stopping.first_rung(settings, trial), journal):
            return False
        asked = sampling.ask(self.study, state)
        journal.write(asked)
        shown = " ".join(sampling.values_as_words(asked.values))
        self.say(f"trial {asked.trial}: {shown}")
        return True

    def _affords(self, rung: int, journal: Journal) -> bool:
        if not self.study.settings.budget:
            return True
        found = budget.parse(self.study.settings.budget)
        return budget.affords(found, journal.state, self._running, rung)

    def _is_afforded(self, work: Work, journal: Journal) -> bool:
        """Whether the budget allows it; a run that has started is always trained to its rung."""
        return self._affords(work.rung, journal) or self._status(work, journal) is not None

    def _is_dropped(self, work: Work, journal: Journal) -> bool:
        """Record a trial that cannot fit as too large, without starting a process."""
        asked = journal.state.asked[work.trial]
        is_begun = journal.state.last(work.trial) is not None or asked.fork is not None
        if self.planner is None or not self.study.settings.cluster or is_begun:
            return False
        if self._status(work, journal) is not None:
            return False
        prospect = self.planner.prospect(asked, self.runner.job(asked, work.rung))
        end = fit.refusal(work, prospect, self.study.settings.cluster)
        if end is None:
            return False
        journal.write(end)
        self._say_end(end)
        self._refuse_hopeless(journal)
        return True

    def _collect(self, journal: Journal) -> bool:
        """Record one job that has ended; return whether there was one."""
        for work in sorted(self._running):
            status = self._status(work, journal)
            is_unknown = status is not None and status.state is JobState.UNKNOWN
            if status is not None and not status.state.is_over and not is_unknown:
                self._lost_s.pop(work, None)
                continue
            resumed = self._running[work]
            end = None if status is None else self.runner.result(work, status, resumed)
            if end is None:
                if self._is_gone(work, _FORGOTTEN_S if is_unknown else SETTLE_S):
                    self._resume(work, journal, is_new=status is None)
                continue
            if self.spent_by is not None:
                asked = journal.state.asked[work.trial]
                end = replace(end, spent=self.spent_by(asked, work.rung))
            journal.write(end)
            del self._running[work]
            self._say_end(end)
            self._refuse_hopeless(journal)
            return True
        return False

    def _is_gone(self, work: Work, after_s: float) -> bool:
        """Whether nothing of the job is left; a launcher that still runs would refuse another."""
        lost_s = self._lost_s.setdefault(work, time.monotonic())
        if time.monotonic() - lost_s < after_s or self.runner.is_leaving(work.trial):
            return False
        del self._lost_s[work]
        return True

    def _resume(self, work: Work, journal: Journal, *, is_new: bool) -> None:
        if not is_new:
            self._running[work] += 1
            self.say(f"trial {work.trial}: interrupted; resuming")
        if self._running[work] > MOST_RESUMES:
            raise DrivetrainError(
                f"trial {work.trial} was interrupted {MOST_RESUMES} times; see "
                f"{self.study.run_dir(work.trial)}, and run the same command again"
            )
        if not self._submit(work, journal) and not is_new:
            self._running[work] -= 1

    def _submit(self, work: Work, journal: Journal) -> bool:
        """Submit it. False if a scheduler that took trials before fails now: retried later."""
        others = [each.trial for each in self._running if each != work]
        try:
            self._has_submitted |= self.runner.start(
                journal.state.asked[work.trial], work.rung, others
            )
        except DrivetrainError as error:
            is_away = isinstance(error, EnvironmentProblem) or not isinstance(error, ConfigError)
            if not (self._has_submitted and is_away):
                raise
            self.say(f"trial {work.trial}: not submitted ({error}); will be retried")
            self._lost_s[work] = time.monotonic() + _AGAIN_S
            return False
        return True

    def _say_end(self, end: Ended) -> None:
        settings = self.study.settings
        if end.outcome == "done":
            pairs = zip(settings.objectives, pareto.values_of(settings, end), strict=True)
            shown = "  ".join(f"{each.metric} {value:.6g}" for each, value in pairs)
            self.say(f"trial {end.trial}: step {end.step}  {shown}")
        else:
            self.say(f"trial {end.trial}: {end.outcome.replace('_', ' ')}: {end.reason}")

    def _refuse_hopeless(self, journal: Journal) -> None:
        """Raise if all of the first generation failed: the script or the space has an error."""
        settings, state = self.study.settings, journal.state
        first = [state.last(trial) for trial in settings.generation_of(0)]
        ends = [each for each in first if each is not None]
        if len(ends) == len(first) and all(e.outcome in ("failed", "too_large") for e in ends):
            failed = [each for each in ends if each.outcome == "failed"]
            what = "failed" if failed else "are too large"
            reason = (failed or ends)[0].reason
            raise DrivetrainError(f"all of the first {len(first)} trials {what}: {reason}")
