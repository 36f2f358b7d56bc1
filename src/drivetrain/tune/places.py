"""Places: the devices or machines of each of the trials that run at the same time.

Slurm, Ray and Kubernetes allocate resources themselves. For this machine's devices and the machines
of a hosts file, each trial is assigned its own here. Its job.json records which, so that the next
driver knows what an adopted trial uses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.files import write_whole
from drivetrain.launch.job import Job
from drivetrain.launch.submission import Submission
from drivetrain.launch.target import Target
from drivetrain.launch.targets.hosts import SshHosts, SshMachine, read_hosts

Place = tuple[str, ...]
"""Devices or machines, by name."""
HOSTS = "hosts"


class Places(Protocol):
    """Assigns places to trials that run at the same time."""

    def free(self, running: Sequence[Submission]) -> Place | None:
        """A place that none of these uses; None if there is none."""
        ...

    def placed(self, place: Place, target: Target, job: Job) -> tuple[Target, Job]:
        """The same target and job at that place; the job's directory exists."""
        ...


class Anywhere:
    """A scheduler allocates resources, or there is nothing to allocate."""

    def free(self, running: Sequence[Submission]) -> Place | None:  # noqa: ARG002
        return ()

    def placed(self, place: Place, target: Target, job: Job) -> tuple[Target, Job]:  # noqa: ARG002
        return target, job


@dataclass(frozen=True)
class OwnDevices:
    """Devices of this machine, assigned by the variable that hides all others from a process."""

    variable: str
    devices: Place
    per_trial: int

    def free(self, running: Sequence[Submission]) -> Place | None:
        taken = {name for made in running for name in self._of(made.job)}
        return _first_free(self.devices, self.per_trial, taken)

    def placed(self, place: Place, target: Target, job: Job) -> tuple[Target, Job]:
        others = [pair for pair in job.environment if pair[0] != self.variable]
        shown = (*others, (self.variable, ",".join(place)))
        return target, dataclasses.replace(job, environment=shown)

    def _of(self, job: Job) -> Place:
        """A trial started alone has no variable set, and uses the first devices."""
        told = dict(job.environment).get(self.variable)
        return self.devices[: job.processes_per_node] if told is None else tuple(told.split(","))


@dataclass(frozen=True)
class OwnMachines:
    """Whole machines of a hosts file. A trial gets its own hosts file in its directory."""

    target: SshHosts
    machines: tuple[SshMachine, ...]
    per_trial: int

    def free(self, running: Sequence[Submission]) -> Place | None:
        taken = {name for made in running for name in _machines_of(made)}
        return _first_free([each.name for each in self.machines], self.per_trial, taken)

    def placed(self, place: Place, target: Target, job: Job) -> tuple[Target, Job]:  # noqa: ARG002
        file = Path(job.run_dir) / HOSTS
        write_whole(file, "".join(_line(each) for each in self.machines if each.name in place))
        return dataclasses.replace(self.target, hosts=str(file)), job


def places_for(target: Target, job: Job, num_parallel: int) -> Places:
    """Places for trials like this job; ConfigError if so many cannot run at a time."""
    if num_parallel == 1:
        return Anywhere()
    if isinstance(target, SshHosts):
        machines = read_hosts(Path(target.hosts or ""))
        _refuse_too_many(num_parallel, job.num_nodes, len(machines), "machines in the hosts file")
        return OwnMachines(target, machines, job.num_nodes)
    if target.name != "local":
        return Anywhere()
    from drivetrain.parallel.accelerator import devices_variable, num_devices  # torch

    count, variable = num_devices(), devices_variable()
    if count == 0:
        return Anywhere()
    if variable is None:
        rule = "this kind of device cannot be divided between trials"
        remedy = "use --parallel-trials 1, with as many ranks as there are devices"
        raise ConfigError([Problem("--parallel-trials", rule, remedy, num_parallel)])
    _refuse_too_many(num_parallel, job.processes_per_node, count, "devices of this machine")
    # those that this process may see, by the names in its environment
    told = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    devices = tuple(told or map(str, range(count)))[:count]
    return OwnDevices(variable, devices, job.processes_per_node)


def _refuse_too_many(num_parallel: int, each: int, there: int, what: str) -> None:
    if num_parallel * each <= there:
        return
    rule = f"trials of {each} each do not fit on the {there} {what}"
    fitting = there // each
    remedy = f"use --parallel-trials {fitting}" if fitting else "use smaller trials"
    raise ConfigError([Problem("--parallel-trials", rule, remedy, num_parallel)])


def _first_free(names: Sequence[str], count: int, taken: set[str]) -> Place | None:
    """The first free block of neighbors: devices that share a switch usually have such numbers."""
    for first in range(0, len(names) - count + 1, count):
        place = tuple(names[first : first + count])
        if taken.isdisjoint(place):
            return place
    return None


def _machines_of(made: Submission) -> Iterable[str]:
    if not isinstance(made.target, SshHosts) or made.target.hosts is None:
        return ()
    return [each.name for each in read_hosts(Path(made.target.hosts))[: made.job.max_nodes]]


def _line(machine: SshMachine) -> str:
    words = [machine.name]
    words += [] if machine.slots is None else [f"slots={machine.slots}"]
    words += [] if machine.address is None else [f"address={machine.address}"]
    return f"{' '.join(words)}\n"
