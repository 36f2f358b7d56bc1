"""Ray: a Ray Train driver one could have written by hand, handed over by Ray's Jobs API."""

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


# Ray as a target: its Jobs API carries the driver, Ray Train runs the workers.

_FILE = "job.py"
_SERVER_FILE = "job-server"
_MORE_S = 20.0
"""Beyond the time for saving: for Ray to end its workers and its job."""


@dataclass(frozen=True)
class Ray(RayOptions):
    """A Ray cluster whose nodes see the client's files."""

    name: ClassVar[str] = "ray"

    def problems(self, job: Job) -> list[Problem]:
        """Also: what Ray has no word for, and what is our supervisor's and not Ray's."""
        found = [*self.option_problems(), *shape_problems(job)]
        if "working_dir" not in (self.environment_file() if not found else {}):
            found += script_problems(job)
        if job.time_limit_s is not None:
            rule, remedy = "Ray has no time limit for a job", "leave it out"
            found.append(Problem("--time", rule, remedy, f"{job.time_limit_s} s"))
        if job.gpus_per_node and job.processes_per_node != job.gpus_per_node:
            rule = f"a Ray worker has one GPU, and {job.gpus_per_node} were asked for per node"
            remedy = f"--nproc-per-node {job.gpus_per_node}"
            found.append(Problem("--nproc-per-node", rule, remedy, job.processes_per_node))
        for word in foreign_flags(job):
            flag, has_value, value = word.partition("=")
            rule = "of Drivetrain's own supervisor; under --on ray, Ray starts and restarts workers"
            found.append(Problem(flag, rule, "leave it out", value, has_value=bool(has_value)))
        return found

    def render(self, job: Job) -> Rendered:
        """The driver, and the command that would hand it over by hand."""
        command = ["ray", "job", "submit", "--no-wait"]
        command += ["--address", self.address] if self.address is not None else []
        environment = self._runtime_env(job)
        command += ["--runtime-env-json", json.dumps(environment)] if environment else []
        command += ["--", *self._entrypoint(job)]
        quoted = tuple(shlex.quote(word) for word in command)
        return Rendered(_FILE, driver_script(job, self), quoted)

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - the file is there
        (Path(job.run_dir) / STOP_FILE).unlink(missing_ok=True)
        entrypoint = shlex.join(self._entrypoint(job))
        environment = self._runtime_env(job)
        server, job_id = jobs.submit(self.address, entrypoint, environment, job.name)
        (Path(job.run_dir) / _SERVER_FILE).write_text(server)
        return job_id

    def poll(self, job: Job, job_id: str) -> Status:
        return jobs.poll(_server(job), job_id)

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """What driver and workers printed, by way of the job server."""
        return jobs.logs(_server(job), job_id, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save, wait for it, and end what is left."""
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
        """The user's own, with the job's variables in it; never written to disk by us."""
        given = self.environment_file()
        variables = {**given.get("env_vars", {}), **dict(job.environment)}
        return {**given, "env_vars": variables} if variables else given


def _server(job: Job) -> str:
    """Where the job was handed in: behind ray://, Ray starts a process for every question."""
    return (Path(job.run_dir) / _SERVER_FILE).read_text()
