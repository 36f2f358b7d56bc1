"""Plain machines over ssh: one supervisor on each, started and held from the client.

The run's directory must be on storage that all of them share: they meet in it and save into it. The
code must be at the same path everywhere; `--sync` copies the working directory there first.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.launch.coordinator import coordinated
from drivetrain.launch.coordinator.member import FILE, Member, Members, with_stdin_watchdog
from drivetrain.launch.job import Job, script_problems, shape_problems
from drivetrain.launch.target import Rendered, option
from drivetrain.launch.targets.hosts_file import Machine, read_hosts
from drivetrain.launch.targets.hosts_ready import check_machines, copy_code, over_ssh

_SSH = "ssh -T -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3"


@dataclass(frozen=True)
class SshHosts(coordinated.Coordinated):
    """Machines that ssh reaches without a password."""

    name: ClassVar[str] = "hosts"

    hosts: str | None = option("a file with one machine per line")
    ssh: str = option("how to reach them, with its options", _SSH)
    sync: bool = option("copy the working directory to each machine first, by rsync", False)
    python: str | None = option("the machines' Python; default: the path of this one")

    def fill_in(self, job: Job, given: Collection[str]) -> Job:
        """All machines of the file and as many processes as it says, unless flags say so."""
        machines = self._machines()
        if "--nnodes" not in given:
            job = dataclasses.replace(job, num_nodes=len(machines), max_nodes=len(machines))
        slots = machines[0].slots
        if slots is not None and not {"--nproc-per-node", "--gpus-per-node"} & set(given):
            job = dataclasses.replace(job, processes_per_node=slots)
        return job

    def problems(self, job: Job) -> list[Problem]:
        """Enough machines? A limit that nobody keeps?"""
        found = [*script_problems(job), *shape_problems(job)]
        count = len(self._machines())
        if job.max_nodes > count:
            rule = f"{self.hosts} names {count}"
            found.append(Problem("--nnodes", rule, "ask for fewer, or name more", job.max_nodes))
        if job.time_limit_s is not None:
            rule = "there is no scheduler to keep it"
            found.append(Problem("--time", rule, "leave it out", f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        """One ssh command per machine."""
        members = [
            Member(machine.name, over_ssh(self.ssh, machine.name, self._on_machine(job, machine)))
            for machine in self._machines()[: job.max_nodes]
        ]
        return Rendered(FILE, Members(tuple(members), job.grace_s).text())

    def submit(self, job: Job, rendered: Rendered) -> str:  # noqa: ARG002 - it lies in the directory
        """Copy, look at every machine, then start."""
        names = [machine.name for machine in self._machines()[: job.max_nodes]]
        if self.sync:
            copy_code(names, self.ssh, job.working_dir)
        check_machines(names, self.ssh, job, self._interpreter)
        return coordinated.start(job)

    def _machines(self) -> tuple[Machine, ...]:
        if self.hosts is None:
            remedy = "--hosts FILE, one machine per line"
            raise ConfigError([Problem("--hosts", "not given", remedy, has_value=False)])
        return read_hosts(Path(self.hosts))

    @property
    def _interpreter(self) -> str:
        return self.python or sys.executable

    def _on_machine(self, job: Job, machine: Machine) -> str:
        """A line of shell. They say under which name the others reach them."""
        words = with_stdin_watchdog(job, self._interpreter, f"--local-addr={machine.reached_at}")
        return f"cd {shlex.quote(job.working_dir)} && exec {shlex.join(words)}"
