"""This machine as a target: the run goes on in the background when the terminal is closed."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import ClassVar

from drivetrain.core.errors import Problem
from drivetrain.launch.coordinator import coordinated
from drivetrain.launch.coordinator.member import FILE, Member, Members, with_stdin_watchdog
from drivetrain.launch.job import Job, script_problems, shape_problems
from drivetrain.launch.target import Rendered


@dataclass(frozen=True)
class Local(coordinated.Coordinated):
    """One node, this one."""

    name: ClassVar[str] = "local"

    def problems(self, job: Job) -> list[Problem]:
        """One machine is one node, and nobody ends its jobs for time."""
        found = [*script_problems(job), *shape_problems(job)]
        if job.num_nodes > 1:
            remedy = "--on hosts or --on slurm has more; here, --nproc-per-node"
            found.append(Problem("--nnodes", "this machine is one node", remedy, job.num_nodes))
        if job.time_limit_s is not None:
            rule = "there is no scheduler to keep it"
            found.append(Problem("--time", rule, "leave it out", f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        member = Member(socket.gethostname(), tuple(with_stdin_watchdog(job, sys.executable)))
        return Rendered(FILE, Members((member,), job.grace_s).text())

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - it lies in the directory
        """Start it in the background."""
        return coordinated.start(job)
