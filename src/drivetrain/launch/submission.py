"""A run that was submitted, and what can be done with it from any client that sees its directory.

`<run>/job.json` remembers the target with its options, the job and the scheduler's id.
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
    copy_of: str = ""
    """The directory this one was copied from, which is still there: the job is that one's."""

    def status(self) -> Status:
        """What the scheduler says; a run that was asked to stop has not failed."""
        found = self.target.poll(self.job, self.id)
        if self.is_stopped and found.state in (State.FAILED, State.UNKNOWN):
            return dataclasses.replace(found, state=State.STOPPED)
        return found

    def logs(self, *, follow: bool) -> Iterator[str]:
        """What the run printed."""
        return self.target.logs(self.job, self.id, follow=follow)


def submit(target: Target, job: Job) -> Submission:
    """Check, render, remember, hand over."""
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
    name = str(options.pop("name"))
    target = _target(name).validate_python(vars(with_options(target_type(name), options)))
    told = {**values["job"], "secrets": _secrets(folder, values["job"].get("secrets", ()))}
    job = _job().validate_python(vars(Job(**told)))
    job_id, submitted_at = values["id"], values["submitted_at"]
    if not (isinstance(job_id, str) and _ID.fullmatch(job_id)):
        raise ValueError(f"{job_id!r} is no job's id")
    if not 0 <= job.grace_s < 1e6:
        raise ValueError(f"grace_s is {job.grace_s:g}")
    if not isinstance(values["is_stopped"], bool):
        raise ValueError("is_stopped is neither true nor false")
    found = Submission(target, job, job_id, str(submitted_at), values["is_stopped"])
    return found if getattr(target, "run_is_elsewhere", False) else _where_it_is(found, folder)


# Making these takes longer than all the rest of reading a job, and a study's are read often.


@functools.cache
def _target(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(target_type(name))


@functools.cache
def _job() -> TypeAdapter[Job]:
    return TypeAdapter(Job)


def _where_it_is(found: Submission, folder: Path) -> Submission:
    """A directory that was moved or copied is the run: the old path is nothing, or another's."""
    before = Path(found.job.run_dir)
    if before.exists() and before.samefile(folder):
        return found  # by another name
    job = dataclasses.replace(found.job, run_dir=str(folder.absolute()))
    return dataclasses.replace(found, job=job, copy_of=str(before) if before.exists() else "")


def _secrets(run_dir: Path, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """With what is in the owner's file; whoever may not read it can still follow the run."""
    try:
        values = ownership.read_secrets(run_dir)
    except PermissionError:
        values = {}
    return tuple((name, values.get(name, "")) for name in names)


def load(run_dir: str | Path) -> Submission:
    """The submission of a run, or an error that says what to do without one."""
    found = find(run_dir)
    if found is None:
        rule = "it has no job.json: the run was not submitted with --on"
        remedy = "give the directory of a run that was, or run the same command again"
        raise ConfigError([Problem("RUN", rule, remedy, str(run_dir))])
    return found


def _unknown(job: Job) -> list[Problem]:
    """Secrets whose file is gone, or somebody else's."""
    rule = f"its value is not known here: {ownership.FILE} is gone, or not yours to read"
    remedy = "submit the run anew with `drivetrain train … --env {}`"
    names = [name for name, value in job.secrets if not value]
    return [Problem("--env", rule, remedy.format(name), name) for name in names]


def _still_there(run_dir: str | Path) -> list[Problem]:
    """Two jobs must not write to one run: what was submitted before has to be over."""
    before = find(run_dir)
    if before is None:
        return []
    try:
        state = before.status().state
    except DrivetrainError as error:
        rule = f"whether its job {before.id} is over cannot be known ({error})"
        remedy = f"once it surely is: rm {Path(run_dir) / FILE}"
        return [Problem("RUN", rule, remedy, str(run_dir))]
    if state not in (State.WAITING, State.RUNNING):
        return []
    remedy = f"drivetrain logs {run_dir} -f follows it, drivetrain stop {run_dir} ends it"
    return [Problem("RUN", f"is {state} as job {before.id}", remedy, str(run_dir))]


def stop(run_dir: str | Path, *, trust: bool = False) -> Submission:
    """Ask the run to save and end, and remember that it was asked, unless that was refused."""
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
    """Submit the same job again: it goes on from its last checkpoint."""
    before = _own(run_dir, trust=trust)
    return submit(before.target, before.job)


def _own(run_dir: str | Path, *, trust: bool) -> Submission:
    """A submission to act on: this user's. Whatever it names, the directory is this one."""
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
    """For others to read, unless the script's own arguments have a secret among them."""
    has_secret = secrets_among((*job.script_args, *job.flags))
    return ownership.OWNERS_ONLY if has_secret else OWN_MODE


def _asdict(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)
