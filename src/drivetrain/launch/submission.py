"""A run that was submitted, and what can be done with it from any desk that sees its directory.

`<run>/job.json` remembers the target with its options, the job and the scheduler's id.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drivetrain.core.bounded import one_line, read_json
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.core.files import write_whole
from drivetrain.launch.job import Job
from drivetrain.launch.target import State, Status, Target, target_type, with_options
from drivetrain.launch.trust import check_own

FILE = "job.json"
OWN_MODE = 0o644
"""Whatever the umask: what is run by these files only their owner may change."""
_ID = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:/-]*")


@dataclass(frozen=True)
class Submission:
    """One run, on one target."""

    target: Target
    job: Job
    id: str
    submitted_at: str
    is_stopped: bool = False
    """Whether it was asked to stop: its end is then no failure."""

    def status(self) -> Status:
        """What the scheduler says; a run that was asked to stop has not failed."""
        found = self.target.poll(self.job, self.id)
        if self.is_stopped and found.state is State.FAILED:
            return dataclasses.replace(found, state=State.STOPPED)
        return found

    def logs(self, *, follow: bool) -> Iterator[str]:
        """What the run printed."""
        return self.target.logs(self.job, self.id, follow=follow)


def submit(target: Target, job: Job) -> Submission:
    """Check, render, remember, hand over."""
    if problems := target.problems(job):
        raise ConfigError(problems)
    rendered = target.render(job)
    folder = Path(job.run_dir)
    write_whole(folder / rendered.filename, rendered.text, mode=OWN_MODE)
    job_id = target.submit(job, rendered)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    submission = Submission(target, job, job_id, now)
    _save(submission)
    return submission


def find(run_dir: str | Path) -> Submission | None:
    """The submission of a run; None when it was not submitted to a target."""
    path = Path(run_dir) / FILE
    try:
        return _checked(read_json(path), path.parent)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # pydantic's are ValueErrors
        reason = one_line(error)[:200]
        raise DamagedRun(f"{path}: not a job that Drivetrain submitted ({reason})") from None


def _checked(values: dict[str, Any], folder: Path) -> Submission:
    """Every value of its kind; what reaches a scheduler's command line is a word."""
    options = dict(values["target"])
    kind = target_type(str(options.pop("name")))
    target = TypeAdapter(kind).validate_python(vars(with_options(kind, options)))
    job = TypeAdapter(Job).validate_python(vars(Job(**values["job"])))
    job_id, submitted_at = values["id"], values["submitted_at"]
    if not (isinstance(job_id, str) and _ID.fullmatch(job_id)):
        raise ValueError(f"{job_id!r} is no job's id")
    if not 0 <= job.grace_s < 1e6:
        raise ValueError(f"grace_s is {job.grace_s:g}")
    if not isinstance(values["is_stopped"], bool):
        raise ValueError("is_stopped is neither true nor false")
    if not getattr(target, "run_is_elsewhere", False):
        job = _where_it_is(job, folder)
    return Submission(target, job, job_id, str(submitted_at), values["is_stopped"])


def _where_it_is(job: Job, folder: Path) -> Job:
    """A directory that was moved or copied is the run: the old path is nothing, or another's."""
    before = Path(job.run_dir)
    if before.exists() and before.samefile(folder):
        return job  # by another name
    return dataclasses.replace(job, run_dir=str(folder.absolute()))


def load(run_dir: str | Path) -> Submission:
    """The submission of a run, or an error that says what to do without one."""
    found = find(run_dir)
    if found is None:
        rule = "it has no job.json: the run was not submitted with --on"
        remedy = "give the directory of a run that was, or start the same command again"
        raise ConfigError([Problem("RUN", rule, remedy, str(run_dir))])
    return found


def stop(run_dir: str | Path, *, trust: bool = False) -> Submission:
    """Ask the run to save and end, and remember that it was asked."""
    submission = dataclasses.replace(_own(run_dir, trust=trust), is_stopped=True)
    _save(submission)
    submission.target.stop(submission.job, submission.id)
    return submission


def resume(run_dir: str | Path, *, trust: bool = False) -> Submission:
    """Submit the same job again: it goes on from its last checkpoint."""
    before = _own(run_dir, trust=trust)
    state = before.status().state
    if state in (State.WAITING, State.RUNNING):
        remedy = f"drivetrain logs {run_dir} -f follows it"
        raise ConfigError([Problem("RUN", f"is {state} as job {before.id}", remedy, str(run_dir))])
    return submit(before.target, before.job)


def _own(run_dir: str | Path, *, trust: bool) -> Submission:
    """A submission to act on: this user's, and of this very directory."""
    submission, folder = load(run_dir), Path(run_dir)
    if not trust:
        check_own(folder / FILE)
    there = Path(submission.job.run_dir)
    if not (there.exists() and there.samefile(folder)):
        rule = f"its job.json is of another directory, {there}: it was moved or copied"
        remedy = "start the command again with this --run-dir"
        raise ConfigError([Problem("RUN", rule, remedy, str(run_dir))])
    return submission


def _save(submission: Submission) -> None:
    values = {
        "target": {"name": submission.target.name, **_asdict(submission.target)},
        "job": _asdict(submission.job),
        "id": submission.id,
        "submitted_at": submission.submitted_at,
        "is_stopped": submission.is_stopped,
    }
    text = json.dumps(values, indent=2) + "\n"
    write_whole(Path(submission.job.run_dir) / FILE, text, mode=OWN_MODE)


def _asdict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
