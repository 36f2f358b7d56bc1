"""background: a target of another package. It runs the job as a process of this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain.core.errors import Problem
from drivetrain.launch.job import Job, script_problems
from drivetrain.launch.tail import tail
from drivetrain.launch.target import Rendered, State, Status, option


@dataclass(frozen=True)
class Background:
    """One process of this machine."""

    name: ClassVar[str] = "background"
    niceness: int = option("How much it gives way to others", 0)

    def problems(self, job: Job) -> list[Problem]:
        return script_problems(job)

    def render(self, job: Job) -> Rendered:
        argv = [sys.executable, "-m", "drivetrain", "train", *job.node_argv()]
        lines = [f"nice -n {self.niceness} {shlex.join(argv)}", f"echo $? > {_end(job)}", ""]
        return Rendered("job.sh", "\n".join(lines), ("sh", "job.sh"))

    def submit(self, job: Job, rendered: Rendered) -> str:
        with _log(job).open("wb") as output:
            process = subprocess.Popen(
                ["sh", str(Path(job.run_dir) / rendered.filename)],
                cwd=job.working_dir,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return str(process.pid)

    def poll(self, job: Job, job_id: str) -> Status:
        if not _end(job).exists():
            return Status(State.RUNNING)
        code = int(_end(job).read_text() or 1)
        return Status(State.FAILED if code else State.FINISHED, exit_code=code)

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        def is_over() -> bool:
            return self.poll(job, job_id).state.is_over

        return tail(lambda: [_log(job)], is_over, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        os.killpg(int(job_id), signal.SIGTERM)


def _end(job: Job) -> Path:
    return Path(job.run_dir) / "exit_code"


def _log(job: Job) -> Path:
    return Path(job.run_dir) / "background.txt"
