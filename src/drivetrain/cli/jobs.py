"""`drivetrain train --on …`, `jobs`, `logs`, `stop`, `resume`: runs that were submitted."""

from __future__ import annotations

from pathlib import Path

from drivetrain.cli.reading import reading
from drivetrain.cli.say import hand_on, say
from drivetrain.core.errors import (
    ConfigError,
    DamagedRun,
    DrivetrainError,
    EnvironmentProblem,
    Problem,
)
from drivetrain.core.text import plain, plain_but_coloured
from drivetrain.launch import submission
from drivetrain.launch.request import Request
from drivetrain.launch.submission import Submission
from drivetrain.launch.target import State, Status


def submit(request: Request) -> int:
    """Submit the job and print the next commands; on a dry run, print what would be submitted."""
    target, job = request.target, request.job
    if problems := target.problems(job):
        raise ConfigError(problems)
    if request.is_dry_run:
        rendered = target.render(job)
        hand_on(plain(rendered.text))
        if rendered.command:
            say(f"would be submitted with: {' '.join(rendered.command)}", err=True)
        return 0
    made = submission.submit(target, job)
    _say_submitted(made)
    return _wait(made) if request.waits else 0


def show(folder: str) -> None:
    """Print one line per submitted run."""
    runs = _runs(Path(folder))
    is_asked_for = runs == [Path(folder)]
    found = [line for path in runs if (line := _line(path, is_asked_for=is_asked_for))]
    if not found:
        rule = "contains no submitted run"
        remedy = "submit one with drivetrain train --on slurm …"
        raise ConfigError([Problem("RUN", rule, remedy, folder)])
    for line in found:
        say(line)


def _line(path: Path, *, is_asked_for: bool) -> str | None:
    """The line of one job; an error in it does not keep the others from being shown.

    `is_asked_for`: it is the only run, so an unreachable job is an error of the command.
    """
    try:
        with reading(str(path)):
            made = submission.find(path)
            if made is None:
                return None
            status = _asked(made)
    except DamagedRun as error:
        return f"{'damaged':<9}  {path}  ({error})"
    except DrivetrainError as error:
        if is_asked_for:
            raise
        return plain(f"{'unreachable':<9}  {path}  ({error})")
    words = [f"{status.state:<9}", made.job.run_dir, f"{made.target.name} job {made.id}"]
    words += [f"on {','.join(status.hosts)}"] if status.hosts else []
    words += [f"({status.detail})"] if status.detail else []
    return "  ".join(words)


def _asked(made: Submission) -> Status:
    try:
        return made.status()
    except OSError as error:  # the run's files can be read, but its cluster does not answer
        rule, remedy = f"does not answer: {error}", "check that it can be reached from here"
        raise EnvironmentProblem([Problem(made.target.name, rule, remedy, made.id)]) from error


def show_logs(run: str, *, follow: bool) -> None:
    """Copy the run's output."""
    _copy(submission.load(run), follow=follow)


def stop(run: str, *, trust: bool) -> None:
    """Ask the run to save and stop."""
    made = submission.stop(run, trust=trust)
    job = f"{made.target.name} job {made.id}"
    say(f"asked {job} to save and stop; resume it with: drivetrain resume {run}")


def resume(run: str, *, trust: bool) -> None:
    _say_submitted(submission.resume(run, trust=trust))


def _runs(folder: Path) -> list[Path]:
    if (folder / submission.FILE).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{submission.FILE}"))


def _say_submitted(made: Submission) -> None:
    job = made.job
    nodes = f"{job.num_nodes} node{'s' if job.num_nodes > 1 else ''}"
    devices = f"{job.gpus_per_node} GPUs each" if job.gpus_per_node else "no GPUs requested"
    say(
        f"{made.target.name} job {made.id}: {nodes} × {job.processes_per_node} processes, {devices}"
    )
    say(f"run directory: {job.run_dir}")
    say(f"drivetrain logs {job.run_dir} -f")


def _wait(made: Submission) -> int:
    _copy(made, follow=True)
    status = made.status()
    if status.state is State.FINISHED:
        return 0
    say(f"{status.state}: {status.detail}", err=True)
    return status.exit_code or 1


def _copy(made: Submission, *, follow: bool) -> None:
    try:
        for piece in made.logs(follow=follow):
            hand_on(plain_but_coloured(piece))
    except KeyboardInterrupt:  # stops following; the run continues
        say(err=True)
