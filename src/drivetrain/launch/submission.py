"""Submissions: runs that were submitted to a target, usable from any client that sees the run.

`<run>/job.json` records the target with its options, the job and the scheduler's job id.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from drivetrain.core.bounded import one_line, read_json
from drivetrain.core.errors import ConfigError, DamagedRun, DrivetrainError, Problem
from drivetrain.core.files import write_whole
from drivetrain.core.redaction import secrets_among
from drivetrain.launch import ownership
from drivetrain.launch.job import Job
from drivetrain.launch.ownership import check_own
from drivetrain.launch.target import State, Status, Target, target_type, with_options
from drivetrain.record.run_directory import RunDirectory

FILE = "job.json"
OWN_MODE = 0o644
"""Whatever the umask: these files name commands, so only their owner may change them."""
_ID = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:/-]*")


@dataclass(frozen=True)
class Submission:
    """A run that was submitted to a target."""

    target: Target
    job: Job
    id: str
    submitted_at: str
    is_stopped: bool = False
    """Whether it was asked to stop, so that its end is not a failure."""
    copy_of: str = ""
    """The directory this one was copied from, if it still exists: the job belongs to that one."""

    def status(self) -> Status:
        """Ask the scheduler; a run that was asked to stop counts as stopped, not as failed."""
        found = self.target.poll(self.job, self.id)
        if self.is_stopped and found.state in (State.FAILED, State.UNKNOWN):
            return dataclasses.replace(found, state=State.STOPPED)
        return found

    def logs(self, *, follow: bool) -> Iterator[str]:
        """Yield what the run printed."""
        return self.target.logs(self.job, self.id, follow=follow)


def submit(target: Target, job: Job) -> Submission:
    """Check and render the job, submit it, and record it in job.json."""
    if problems := [*target.problems(job), *_unknown(job), *_still_there(job.run_dir)]:
        raise ConfigError(problems)
    rendered = target.render(job)
    folder = Path(job.run_dir)
    ownership.write_secrets(folder, job.secrets)
    write_whole(folder / rendered.filename, rendered.text, mode=_mode(job))
    job_id = target.submit(job, rendered)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    submission = Submission(target, job, job_id, now)
    _save(submission)
    return submission


def find(run_dir: str | Path) -> Submission | None:
    """Return the submission of a run; None if it was not submitted to a target."""
    path = Path(run_dir) / FILE
    try:
        return _checked(read_json(path), path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # pydantic raises ValueError
        reason = one_line(error)[:200]
        raise DamagedRun(f"{path}: not a job that Drivetrain submitted ({reason})") from None


def _checked(values: dict[str, Any], folder: Path) -> Submission:
    """Check all types, and that the job id is safe on a scheduler's command line."""
    options = dict(values["target"])
    name = str(options.pop("name"))
    target = _target(name).validate_python(vars(with_options(target_type(name), options)))
    told = {**values["job"], "secrets": _secrets(folder, values["job"].get("secrets", ()))}
    job = _job().validate_python(vars(Job(**told)))
    job_id, submitted_at = values["id"], values["submitted_at"]
    if not (isinstance(job_id, str) and _ID.fullmatch(job_id)):
        raise ValueError(f"{job_id!r} is not a job id")
    if not 0 <= job.grace_s < 1e6:
        raise ValueError(f"grace_s is {job.grace_s:g}")
    if not isinstance(values["is_stopped"], bool):
        raise ValueError("is_stopped is not true or false")
    found = Submission(target, job, job_id, str(submitted_at), values["is_stopped"])
    return found if getattr(target, "run_is_elsewhere", False) else _where_it_is(found, folder)


# Creating these takes longer than the rest of reading a job, and a study's jobs are read often.


@functools.cache
def _target(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(target_type(name))


@functools.cache
def _job() -> TypeAdapter[Job]:
    return TypeAdapter(Job)


def _where_it_is(found: Submission, folder: Path) -> Submission:
    """Use the directory's own path if it was moved or copied; note the original of a copy."""
    before = Path(found.job.run_dir)
    if before.exists() and before.samefile(folder):
        return found  # the same directory under another path
    job = dataclasses.replace(found.job, run_dir=str(folder.absolute()))
    return dataclasses.replace(found, job=job, copy_of=str(before) if before.exists() else "")


def _secrets(run_dir: Path, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The secrets with their values; empty values for a user who may not read the file."""
    try:
        values = ownership.read_secrets(run_dir)
    except PermissionError:
        values = {}
    return tuple((name, values.get(name, "")) for name in names)


def load(run_dir: str | Path) -> Submission:
    """Return the submission of a run; ConfigError if there is none."""
    found = find(run_dir)
    if found is None:
        rule = "it has no job.json: the run was not submitted with --on"
        remedy = "give the directory of a run that was, or run the same command again"
        if RunDirectory(Path(run_dir)).run_yaml.exists():
            rule = "was started on this machine, not submitted with --on"
            remedy = (
                f"follow it with drivetrain watch {run_dir}, stop it with Ctrl-C where it runs, "
                "and resume it by running the same command again"
            )
        raise ConfigError([Problem("RUN", rule, remedy, str(run_dir))])
    return found


def _unknown(job: Job) -> list[Problem]:
    """Problems for secrets whose file is missing or not readable."""
    rule = f"its value is not known here: {ownership.FILE} is missing or not readable"
    remedy = "submit the run again with `drivetrain train … --env {}`"
    names = [name for name, value in job.secrets if not value]
    return [Problem("--env", rule, remedy.format(name), name) for name in names]


def _still_there(run_dir: str | Path) -> list[Problem]:
    """Two jobs must not write to one run: an earlier job must be over."""
    before = find(run_dir)
    if before is None:
        return []
    try:
        state = before.status().state
    except DrivetrainError as error:
        rule = f"cannot tell whether its job {before.id} is over ({error})"
        remedy = f"when you are sure that it is: rm {Path(run_dir) / FILE}"
        return [Problem("RUN", rule, remedy, str(run_dir))]
    if state not in (State.WAITING, State.RUNNING):
        return []
    remedy = (
        f"follow it with drivetrain logs {run_dir} -f, or end it with drivetrain stop {run_dir}"
    )
    return [Problem("RUN", f"is {state} as job {before.id}", remedy, str(run_dir))]


def stop(run_dir: str | Path, *, trust: bool = False) -> Submission:
    """Ask the run to save and end; record the request unless the scheduler refused it."""
    before = _own(run_dir, trust=trust)
    if before.copy_of:
        rule = f"is a copy of {before.copy_of}, whose job {before.id} is"
        remedy = f"drivetrain stop {before.copy_of}"
        raise ConfigError([Problem("RUN", rule, remedy, str(run_dir))])
    asked = dataclasses.replace(before, is_stopped=True)
    _save(asked)
    try:
        asked.target.stop(asked.job, asked.id)
    except Exception:
        _save(before)
        raise
    return asked


def resume(run_dir: str | Path, *, trust: bool = False) -> Submission:
    """Submit the same job again; it resumes from its last checkpoint."""
    before = _own(run_dir, trust=trust)
    return submit(before.target, before.job)


def _own(run_dir: str | Path, *, trust: bool) -> Submission:
    """Load a submission to act on; unless `trust`, it must belong to this user."""
    submission = load(run_dir)
    if not trust:
        check_own(Path(run_dir) / FILE)
    return submission


def _save(submission: Submission) -> None:
    values = {
        "target": {"name": submission.target.name, **_asdict(submission.target)},
        "job": {**_asdict(submission.job), "secrets": [n for n, _ in submission.job.secrets]},
        "id": submission.id,
        "submitted_at": submission.submitted_at,
        "is_stopped": submission.is_stopped,
    }
    path = Path(submission.job.run_dir) / FILE
    write_whole(path, json.dumps(values, indent=2) + "\n", mode=_mode(submission.job))


def _mode(job: Job) -> int:
    """Readable by others, unless the arguments contain a secret."""
    has_secret = secrets_among((*job.script_args, *job.flags))
    return ownership.OWNERS_ONLY if has_secret else OWN_MODE


def _asdict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
