"""The Ray target: a readable Ray Train driver, submitted with Ray's Jobs API."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.core.errors import Problem
from drivetrain.launch.job import Job, script_problems, shape_problems
from drivetrain.launch.target import Rendered, State, Status
from drivetrain.launch.targets.ray import jobs
from drivetrain.launch.targets.ray.driver import RayOptions, driver_script, foreign_flags
from drivetrain.launch.targets.ray.worker import STOP_FILE

__all__ = ["Ray"]


# The Jobs API runs the driver, Ray Train runs the workers.

_FILE = "job.py"
_SERVER_FILE = "job-server"
_MORE_S = 20.0
"""In addition to the time for saving: for Ray to end its workers and its job."""


@dataclass(frozen=True)
class Ray(RayOptions):
    """Run on a Ray cluster whose nodes see the client's files."""

    name: ClassVar[str] = "ray"

    def problems(self, job: Job) -> list[Problem]:
        """Also refuse what Ray does not support, and options of Drivetrain's supervisor."""
        found = [*self.option_problems(), *shape_problems(job)]
        if "working_dir" not in (self.environment_file() if not found else {}):
            found += script_problems(job)
        if job.time_limit_s is not None:
            rule, remedy = "Ray has no time limit for a job", "leave it out"
            found.append(Problem("--time", rule, remedy, f"{job.time_limit_s} s"))
        if job.gpus_per_node and job.processes_per_node != job.gpus_per_node:
            rule = f"a Ray worker has one GPU, and {job.gpus_per_node} GPUs per node were requested"
            remedy = f"--nproc-per-node {job.gpus_per_node}"
            found.append(Problem("--nproc-per-node", rule, remedy, job.processes_per_node))
        for word in foreign_flags(job):
            flag, has_value, value = word.partition("=")
            rule = "an option of Drivetrain's supervisor; here, Ray starts and restarts the workers"
            found.append(Problem(flag, rule, "leave it out", value, has_value=bool(has_value)))
        return found

    def render(self, job: Job) -> Rendered:
        """Return the driver, and the command that would submit it manually."""
        command = ["ray", "job", "submit", "--no-wait"]
        command += ["--address", self.address] if self.address is not None else []
        environment = self._runtime_env(job)
        command += ["--runtime-env-json", json.dumps(environment)] if environment else []
        command += ["--", *self._entrypoint(job)]
        quoted = tuple(shlex.quote(word) for word in command)
        return Rendered(_FILE, driver_script(job, self), quoted)

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - the file exists already
        (Path(job.run_dir) / STOP_FILE).unlink(missing_ok=True)
        entrypoint = shlex.join(self._entrypoint(job))
        environment = self._runtime_env(job)
        server, job_id = jobs.submit(self.address, entrypoint, environment, job.name)
        (Path(job.run_dir) / _SERVER_FILE).write_text(server)
        return job_id

    def poll(self, job: Job, job_id: str) -> Status:
        return jobs.poll(_server(job), job_id)

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """Yield what the driver and the workers printed, from the job server."""
        return jobs.logs(_server(job), job_id, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save, wait for them, and stop the job if it still runs."""
        if self.poll(job, job_id).state is State.RUNNING:
            (Path(job.run_dir) / STOP_FILE).touch()
            deadline_s = time.monotonic() + job.grace_s + _MORE_S
            while time.monotonic() < deadline_s:
                if self.poll(job, job_id).state is not State.RUNNING:
                    return
                time.sleep(1.0)
        jobs.end(_server(job), job_id)

    def _entrypoint(self, job: Job) -> list[str]:
        return [self.interpreter, f"{job.run_dir}/{_FILE}"]

    def _runtime_env(self, job: Job) -> dict[str, Any]:
        """Return the user's runtime environment plus the job's variables; never stored on disk."""
        given = self.environment_file()
        variables = {**given.get("env_vars", {}), **dict(job.environment)}
        return {**given, "env_vars": variables} if variables else given


def _server(job: Job) -> str:
    """Return the job server's address: with ray://, Ray starts a process for each request."""
    return (Path(job.run_dir) / _SERVER_FILE).read_text()
