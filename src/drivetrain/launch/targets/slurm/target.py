"""Slurm as a target: sbatch, squeue, sacct, scontrol and scancel."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem
from drivetrain.launch.job import Job, script_problems, shape_problems
from drivetrain.launch.tail import tail
from drivetrain.launch.target import Rendered, State, Status
from drivetrain.launch.targets.slurm import states
from drivetrain.launch.targets.slurm.options import Options
from drivetrain.launch.targets.slurm.script import LOGS, sbatch_script, signal_s

_FILE = "job.sh"
_JOB_NAME = re.compile(r"[\w.+:@,=-]+")
_ANSWER_S = 60
_MORE_S = 10.0
"""Beyond the time for saving: for the ranks to end and Slurm to notice."""


@dataclass(frozen=True)
class Slurm(Options):
    """A cluster whose login node this is."""

    name: ClassVar[str] = "slurm"

    def problems(self, job: Job) -> list[Problem]:
        """Also: a time limit that leaves no time to train before the signal comes."""
        found = [*script_problems(job), *shape_problems(job), *_line_problems(job, self)]
        if job.time_limit_s is not None and job.grace_s < job.time_limit_s <= signal_s(job):
            rule = f"the signal to save comes {signal_s(job)} s before the limit"
            remedy = "ask for more time, or a shorter --grace-period"
            found.append(Problem("--time", rule, remedy, f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        """The sbatch script."""
        command = ("sbatch", "--parsable", f"{job.run_dir}/{_FILE}")
        return Rendered(_FILE, sbatch_script(job, self), command)

    def submit(self, job: Job, rendered: Rendered) -> str:
        """Slurm's job id."""
        # sbatch does not make the folder of --output, and the job would end without a word
        (Path(job.run_dir) / LOGS).mkdir(parents=True, exist_ok=True)
        return _slurm(*rendered.command).strip().partition(";")[0]

    def poll(self, job: Job, job_id: str) -> Status:  # noqa: ARG002
        """From whichever of Slurm's tools still knows the job."""
        asks = (
            (states.from_squeue, ("squeue", "-h", "-j", job_id, "-o", states.SQUEUE_FORMAT)),
            (states.from_sacct, ("sacct", "-XnP", "-j", job_id, "-o", states.SACCT_FORMAT)),
            (states.from_scontrol, ("scontrol", "show", "job", "-o", job_id)),
        )
        for read, command in asks:
            found = read(_answer(*command) or "")
            if found is not None:
                return found
        _check_that_slurm_answers(job_id)
        return Status(State.UNKNOWN, f"Slurm no longer knows job {job_id}")

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """What all lives of the run printed, oldest job first."""
        folder = Path(job.run_dir) / LOGS

        def paths() -> list[Path]:
            return sorted(folder.glob("slurm-*.out"), key=_number)

        def is_over() -> bool:
            state = self.poll(job, job_id).state
            return state.is_over or state is State.UNKNOWN

        return tail(paths, is_over, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save, wait for it, and cancel what is left."""
        if self.poll(job, job_id).state is State.RUNNING:
            _answer("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            _answer("scancel", "--signal=TERM", job_id)
            deadline_s = time.monotonic() + job.grace_s + _MORE_S
            while time.monotonic() < deadline_s:
                if self.poll(job, job_id).state is not State.RUNNING:
                    return
                time.sleep(0.5)
        _slurm("scancel", job_id)


def _line_problems(job: Job, options: Options) -> list[Problem]:
    """What would end its line of the script, and be run as the next one."""
    found = []
    if not _JOB_NAME.fullmatch(job.name):
        rule = "Slurm takes letters, digits and . _ + : @ , = - for a name"
        found.append(Problem("--job-name", rule, "--job-name my-run", job.name))
    given = {"run_dir": job.run_dir, "working_dir": job.working_dir} | dataclasses.asdict(options)
    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            where = f"--{name.replace('_', '-')}"
            rule = "has a line break or another character that is not printed"
            found.append(Problem(where, rule, "leave it out", has_value=False))
    return found


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _slurm(*command: str) -> str:
    """What one of Slurm's tools answers; its own words when it refuses."""
    done = _run(command)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise DrivetrainError(f"{command[0]}: {said}")
    return done.stdout


def _check_that_slurm_answers(job_id: str) -> None:
    """A controller that is down knows nothing of any job, and says something else."""
    done = _run(("squeue", "-h", "-j", job_id))
    if done.returncode and "Invalid job id" not in done.stderr:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise DrivetrainError(f"squeue: {said}")


def _answer(*command: str) -> str | None:
    """The same, where no answer is an answer: sacct without accounting, a job forgotten."""
    if shutil.which(command[0]) is None:
        return None
    done = _run(command)
    return done.stdout if done.returncode == 0 else None


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except FileNotFoundError:
        rule = "Slurm's commands are not on this machine"
        remedy = "submit from a login node of the cluster"
        problem = Problem(command[0], rule, remedy, has_value=False)
        raise EnvironmentProblem([problem]) from None
    except subprocess.TimeoutExpired:
        raise DrivetrainError(f"{command[0]}: no answer within {_ANSWER_S} s") from None
