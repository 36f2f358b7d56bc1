"""The local target: a background run on this machine that survives closing the terminal."""

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
    """Run in the background on this machine."""

    name: ClassVar[str] = "local"

    def problems(self, job: Job) -> list[Problem]:
        """Refuse more than one node, and time limits, which nothing enforces here."""
        found = [*script_problems(job), *shape_problems(job)]
        if job.num_nodes > 1:
            remedy = "use --on hosts or --on slurm; for more processes here, --nproc-per-node"
            found.append(Problem("--nnodes", "this machine is one node", remedy, job.num_nodes))
        if job.time_limit_s is not None:
            rule = "there is no scheduler to enforce it"
            found.append(Problem("--time", rule, "leave it out", f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        member = Member(socket.gethostname(), tuple(with_stdin_watchdog(job, sys.executable)))
        return Rendered(FILE, Members((member,), job.grace_s).text())

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - it is in the directory
        """Start the run in the background."""
        return coordinated.start(job)
