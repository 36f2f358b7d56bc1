"""One trial on a target: an ordinary run, submitted like any other, and observed from outside.

Policy, for each way a trial's job can end:

    finished                     its value is read from the run's last evaluation
    NaN or infinite loss         ends at once and is not repeated: it would happen again
    invalid config, layout or
    environment                  likewise
    failure in training          the run's own supervisor restarts it, as long as that may help
    supervisor killed            resumed by the driver, max_restarts times
    preempted, stopped, lost     resumed by the driver

A job that waits in a queue counts as running. If its scheduler does not answer, its status is
unknown (`NoAnswer`), and it is asked again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core import locks
from drivetrain.core.errors import (
    ConfigError,
    DamagedRun,
    DrivetrainError,
    NonFiniteLoss,
    Preempted,
    Problem,
    WorkerFailure,
)
from drivetrain.core.text import plain
from drivetrain.launch import submission
from drivetrain.launch.guardian import LOCK
from drivetrain.launch.job import Job
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status, Target
from drivetrain.record.reading import open_run
from drivetrain.record.status import status_of
from drivetrain.tune import fork
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Outcome
from drivetrain.tune.places import Anywhere, Places
from drivetrain.tune.sampling import values_as_words
from drivetrain.tune.settings import MEASURED, Study
from drivetrain.tune.stopping import config_words

MOST_RESUMES = 100
"""Resumes of one rung of a trial by one driver: a run that is killed as often makes no progress."""

SETTLE_S = 3.0
"""By then a launcher that was starting when its job was killed holds its lock or is gone."""

VALUES = "DRIVETRAIN_TRIAL_VALUES"
"""A trial's values as JSON, if they are a function's argument and not config keys."""

_BY_SIGNAL = 128
"""A shell's exit code for a process ended by signal n is this plus n."""


_MOST_REASON = 300
"""Characters of a reason."""

_LOOK_S = 0.2
_ASK_S, _ASK_EACH_S = 1.0, 0.1
"""Reading a file costs nothing; asking a scheduler is a process here and work there."""


class NoAnswer(DrivetrainError):
    """The scheduler could not be asked, so the job's status is unknown."""


def local_job(study: Study) -> Job:
    """The job that all trials on this machine are based on."""
    settings, name = study.settings, study.path.absolute().name
    ranks = settings.processes_per_trial
    return Job(name, settings.script, (), (), "", str(Path.cwd()), processes_per_node=ranks)


@dataclass(frozen=True)
class Runner:
    """Runs a study's trials on a target."""

    study: Study
    target: Target
    like: Job
    """The job as `drivetrain train --on` would submit it; trials differ in name, arguments and
    directory."""
    places: Places = dataclasses.field(default_factory=Anywhere)

    def job(self, asked: Asked, rung: int) -> Job:
        """The job of a trial up to a rung. The same arguments mean the same job."""
        settings = self.study.settings
        words = [*settings.script_args]
        environment = self.like.environment
        if self.study.space.is_config:
            words += [*values_as_words(asked.values), *config_words(settings, asked, rung)]
        else:
            environment = (*environment, (VALUES, json.dumps(dict(asked.values))))
        words += fork.words(self.study, asked)
        return dataclasses.replace(
            self.like,
            name=f"{self.like.name}-{asked.trial}",
            script_args=tuple(words),
            flags=(*self.like.flags, *fork.flags(asked)),
            run_dir=str(self.study.run_dir(asked.trial).absolute()),
            environment=environment,
        )

    def status(self, asked: Asked, rung: int) -> Status | None:
        """Status of the job of this rung; None if there is none yet."""
        made = submission.find(self.study.run_dir(asked.trial))
        if made is None or made.job.script_args != self.job(asked, rung).script_args:
            return None
        try:
            return made.status()
        except DamagedRun:
            raise
        except (DrivetrainError, OSError) as error:
            raise NoAnswer(f"{made.target.name} does not answer ({error})") from None

    def has_room(self, running: Iterable[int]) -> bool:
        """Whether there is a place for one more trial next to these."""
        return self.places.free(self._made(running)) is not None

    def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:
        """Submit or resume it; the run knows where it was. False if no place is free."""
        place = self.places.free(self._made(running))
        if place is None:
            return False
        job = self.job(asked, rung)
        Path(job.run_dir).mkdir(parents=True, exist_ok=True)
        submission.submit(*self.places.placed(place, self.target, job))
        return True

    def _made(self, trials: Iterable[int]) -> list[submission.Submission]:
        found = (submission.find(self.study.run_dir(trial)) for trial in trials)
        return [made for made in found if made is not None]

    def pause_s(self, num_running: int) -> float:
        """Seconds between two looks at all running trials."""
        is_seen = self.target.name in ("local", "hosts")  # their coordinator is a process here
        return _LOOK_S if is_seen else _ASK_S + _ASK_EACH_S * num_running

    def record(self, trial: int) -> Path:
        """The directory that the trial's ranks write to; on Kubernetes it is on a volume."""
        run_dir = self.study.run_dir(trial)
        if not getattr(self.target, "run_is_elsewhere", False):
            return run_dir
        made = submission.find(run_dir)
        return run_dir if made is None else Path(made.target.run_dir_of(made.job))  # type: ignore[attr-defined]

    def is_leaving(self, trial: int) -> bool:
        """Whether its ranks are still saving and exiting, although its job is over."""
        return locks.holder(self.record(trial) / LOCK) is not None

    def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:
        """The result of a job that is over; None if it should be resumed."""
        run_dir = self.record(work.trial)
        if status.state is JobState.FINISHED:
            return self._value(work, run_dir)
        code = status.exit_code
        if (
            code == WorkerFailure.exit_code
        ):  # Ray's driver exits with this, whatever its workers' code
            code = _first_failure(run_dir) or code
        if status.state is not JobState.FAILED or code in (None, Preempted.exit_code):
            return None
        if self.is_leaving(work.trial):
            # submitted twice, since a scheduler did not confirm it: the other job has the run
            return None
        # a job that failed with exit code 0 was ended by its scheduler
        is_killed = code is not None and (code <= 0 or code >= _BY_SIGNAL)
        if is_killed and num_resumed < self.study.settings.max_restarts:
            return None
        outcome: Outcome = "not_finite" if code == NonFiniteLoss.exit_code else "failed"
        # a killed trial's last line is its progress
        said = "" if is_killed else _last_line(self.study.run_dir(work.trial))
        reason = _reason(run_dir) or said or status.detail
        return Ended(work.trial, work.rung, outcome, reason=reason)

    def _value(self, work: Work, run_dir: Path) -> Ended:
        """The metric at the run's last evaluation, or at the rung with --promote stop.

        ConfigError if the study's settings cannot be right for any trial.
        """
        settings = self.study.settings
        if settings.further or settings.metric in MEASURED:
            return self._objectives(work, run_dir)
        name = f"val/{settings.metric}"
        scalars = open_run(run_dir).scalars()
        series = scalars.get(name)
        if series is None or not len(series):
            raise _no_metric(work.trial, settings.metric, scalars)
        at = len(series) - 1
        last_step = max(_last_step(run_dir), int(series.steps[at]))
        self._refuse_late_rungs(work, last_step)
        if settings.promote == "stop" and work.rung < len(settings.rungs):
            rung = settings.rungs[work.rung]
            at = next((index for index, step in enumerate(series.steps) if step >= rung), at)
        step, value = int(series.steps[at]), float(series.values[at])
        if not math.isfinite(value):
            return Ended(work.trial, work.rung, "not_finite", step, reason=f"{name} is {value}")
        return Ended(work.trial, work.rung, "done", step, value)

    def _objectives(self, work: Work, run_dir: Path) -> Ended:
        """All objectives, at the end of the run."""
        run = open_run(run_dir)
        scalars, status = run.scalars(), status_of(run, 0.0)
        found, step = [], status.step
        for name in (each.metric for each in self.study.settings.objectives):
            if name == "time_s":
                found.append(status.ledger.seconds["productive"])
            elif name == "cost" and status.money is None:
                rule, remedy = (
                    "no price is known",
                    "set record.price_per_device_hour=2.5 for each trial",
                )
                raise ConfigError([Problem("--objective", rule, remedy, name)])
            elif name == "cost" and status.money is not None:
                found.append(status.money.spent)
            elif (series := scalars.get(f"val/{name}")) is not None and len(series):
                found.append(float(series.values[-1]))
            else:
                raise _no_metric(work.trial, name, scalars)
        if not all(map(math.isfinite, found)):
            names = (each.metric for each in self.study.settings.objectives)
            reason = ", ".join(f"{n} is {v}" for n, v in zip(names, found, strict=True))
            return Ended(work.trial, work.rung, "not_finite", step, reason=reason)
        several = tuple(found) if self.study.settings.further else ()
        return Ended(work.trial, work.rung, "done", step, found[0], several)

    def _refuse_late_rungs(self, work: Work, step: int) -> None:
        """Raise if a run ends before a rung: it would be judged as if it had reached it."""
        settings = self.study.settings
        if settings.promote == "stop" or settings.patience is not None:
            return
        rung = (*settings.rungs, 0)[work.rung]
        if step < rung:
            rule = f"trial {work.trial} ends after step {step}, before step {rung}"
            remedy = "use earlier rungs in another --study, or longer runs"
            raise ConfigError(
                [Problem("--rungs", rule, remedy, ",".join(map(str, settings.rungs)))]
            )


def _no_metric(trial: int, name: str, scalars: Iterable[str]) -> ConfigError:
    there = ", ".join(each for each in scalars if each.startswith("val/")) or "none"
    rule = f"no evaluation of trial {trial} has val/{name}; found: {there}"
    remedy = "name one of them; until a trial has a value, the same study accepts another"
    return ConfigError([Problem("--metric", rule, remedy, name)])


def _last_step(run_dir: Path) -> int:
    return status_of(open_run(run_dir), 0.0).step


def _reason(run_dir: Path) -> str:
    """The reason that the run recorded; empty if it has no records."""
    try:
        return status_of(open_run(run_dir), 0.0).reason[:_MOST_REASON]
    except DrivetrainError:
        return ""


def _last_line(folder: Path) -> str:
    """The last line that the job printed: the error of a run that was refused before it began."""
    try:
        made = submission.find(folder)
        printed = () if made is None else made.logs(follow=False)
        lines = (line.strip() for text in printed for line in text.splitlines())
        last = deque(filter(None, lines), maxlen=1)
    except (DrivetrainError, OSError):
        return ""
    return plain(last[0])[:_MOST_REASON] if last else ""


def _first_failure(run_dir: Path) -> int | None:
    """Exit code of the rank that failed first, from the records of the last attempt."""
    try:
        attempts = open_run(run_dir).attempts()
    except DrivetrainError:
        return None
    failures = attempts[-1].end.get("failures") if attempts else None
    return int(failures[0]["exit_code"]) if failures else None
