"""One trial on a target: an ordinary run, submitted like any other, and looked at from outside.

Policy, for each way a trial's job can end:

    finished                      its value is read from the run's last evaluation
    a loss that is no number      it ends at once and is not repeated: it would be the same again
    what was said cannot be done  (config, layout, environment) likewise
    a failure in training         the run's own supervisor restarts it, max_restarts times
    its supervisor is killed      resumed by the driver, max_restarts times
    preempted, stopped, lost      resumed by the driver
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core import locks
from drivetrain.core.errors import DrivetrainError, NonFiniteLoss
from drivetrain.launch import submission
from drivetrain.launch.guardian import LOCK
from drivetrain.launch.job import Job
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status, Target
from drivetrain.record.reading import open_run
from drivetrain.record.status import status_of
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Outcome
from drivetrain.tune.sampling import values_as_words
from drivetrain.tune.settings import Study
from drivetrain.tune.stopping import config_words

MOST_RESUMES = 100
"""Of one rung of a trial by one driver: what is killed as often never comes anywhere."""

VALUES = "DRIVETRAIN_TRIAL_VALUES"
"""A trial's values as JSON, where they are no config keys but a function's argument."""

_BY_SIGNAL = 128
"""A shell's exit code for a process that signal n has ended is this and n."""


@dataclass(frozen=True)
class Runner:
    """Where a study's trials run."""

    study: Study
    target: Target
    working_dir: str

    def job(self, asked: Asked, rung: int) -> Job:
        """The run of a trial, up to a rung. The same words mean the same job."""
        settings = self.study.settings
        words = [*settings.script_args]
        environment: tuple[tuple[str, str], ...] = ()
        if self.study.space.is_config:
            words += [*values_as_words(asked.values), *config_words(settings, asked, rung)]
        else:
            environment = ((VALUES, json.dumps(dict(asked.values))),)
        run_dir = self.study.run_dir(asked.trial).absolute()
        return Job(
            name=f"{self.study.path.absolute().name}-{asked.trial}",
            script=settings.script,
            script_args=tuple(words),
            flags=(f"--max-restarts={settings.max_restarts}",),
            run_dir=str(run_dir),
            working_dir=self.working_dir,
            processes_per_node=settings.processes_per_trial,
            environment=environment,
        )

    def status(self, asked: Asked, rung: int) -> Status | None:
        """Of the job of this rung; None when there is none yet."""
        made = submission.find(self.study.run_dir(asked.trial))
        if made is None or made.job.script_args != self.job(asked, rung).script_args:
            return None
        return made.status()

    def start(self, asked: Asked, rung: int) -> None:
        """Submit it, or resume it: the run knows where it was."""
        job = self.job(asked, rung)
        Path(job.run_dir).mkdir(parents=True, exist_ok=True)
        submission.submit(self.target, job)

    def is_leaving(self, trial: int) -> bool:
        """Whether its ranks are still about to save and end, though its job is over."""
        return locks.holder(self.study.run_dir(trial) / LOCK) is not None

    def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:
        """What a job that is over has come to; None when it should be resumed."""
        run_dir = self.study.run_dir(work.trial)
        if status.state is JobState.FINISHED:
            return self._value(work, run_dir)
        code = status.exit_code
        if status.state is JobState.STOPPED or code is None:
            return None
        is_killed = code < 0 or code >= _BY_SIGNAL
        if is_killed and num_resumed < self.study.settings.max_restarts:
            return None
        outcome: Outcome = "not_finite" if code == NonFiniteLoss.exit_code else "failed"
        reason = _reason(run_dir) or status.detail
        return Ended(work.trial, work.rung, outcome, reason=reason)

    def _value(self, work: Work, run_dir: Path) -> Ended:
        """The metric at the run's last evaluation, or at the rung if it went straight on there."""
        settings = self.study.settings
        name = f"val/{settings.metric}"
        scalars = open_run(run_dir).scalars()
        series = scalars.get(name)
        if series is None or not len(series):
            there = ", ".join(each for each in scalars if each.startswith("val/")) or "none"
            reason = f"no evaluation has {name} (there: {there})"
            return Ended(work.trial, work.rung, "failed", reason=reason)
        at = len(series) - 1
        if settings.promote == "stop" and work.rung < len(settings.rungs):
            rung = settings.rungs[work.rung]
            at = next((index for index, step in enumerate(series.steps) if step >= rung), at)
        step, value = int(series.steps[at]), float(series.values[at])
        if not math.isfinite(value):
            return Ended(work.trial, work.rung, "not_finite", step, reason=f"{name} is {value}")
        return Ended(work.trial, work.rung, "done", step, value)


def _reason(run_dir: Path) -> str:
    """In the run's own words, if it came so far as to have any."""
    try:
        return status_of(open_run(run_dir), 0.0).reason[:300]
    except DrivetrainError:
        return ""
