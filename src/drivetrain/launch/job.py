"""Job: a run as it is handed to a target. Plain values; nothing here starts anything."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem


@dataclass(frozen=True)
class Job:
    """What is to run, on how much, for how long; the same for every target."""

    name: str
    script: str
    script_args: tuple[str, ...]
    flags: tuple[str, ...]
    """Further flags of `drivetrain train` for each node: --live, -m, --stall-timeout=…"""
    run_dir: str
    """Absolute, on storage that all nodes share; the client keeps job.json in it."""
    working_dir: str
    """Where the client was when the job was asked for; nodes start there."""
    num_nodes: int = 1
    max_nodes: int = 1
    """More than num_nodes: the run is elastic between the two."""
    processes_per_node: int = 1
    gpus_per_node: int = 0
    """To ask the scheduler for; 0: the run needs none."""
    time_limit_s: int | None = None
    grace_s: float = 30.0
    """How long the ranks may take to save once they are asked to stop."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables the ranks need that the target would not hand on by itself."""
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Such variables that look like secrets: in a file of the owner's (`secret_variables`), and in
    nothing that is rendered. An empty value is one that is not known here."""
    owner: str = ""
    """user@host that submitted the run first: two users' runs may have the same path."""

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave."""
        return self.max_nodes > self.num_nodes

    @property
    def is_module(self) -> bool:
        """Whether the script is a module's name and not a file."""
        return bool({"-m", "--module"} & set(self.flags))

    def node_argv(self, *more_flags: str) -> tuple[str, ...]:
        """What every node runs after `drivetrain train`; `more_flags` are the target's own."""
        nodes = f"{self.num_nodes}:{self.max_nodes}" if self.is_elastic else str(self.num_nodes)
        return (
            f"--nnodes={nodes}",
            f"--nproc-per-node={self.processes_per_node}",
            f"--run-dir={self.run_dir}",
            f"--grace-period={self.grace_s:g}",
            *more_flags,
            *self.flags,
            self.script,
            *self.script_args,
        )


def seconds_of(text: str) -> int:
    """A time limit as Slurm reads it: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN or D-H:MIN:SEC."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        remedy = "MINUTES, H:MM:SS or DAYS-HOURS, as Slurm takes it"
        raise ConfigError([Problem("--time", "not a time limit", remedy, text)])
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # hours come first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes come first
        hours, minutes, seconds = (0, *(*parts, 0)[:2])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def time_text(seconds: int) -> str:
    """7200 → '2:00:00', the form everybody reads."""
    minutes, secs = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def script_problems(job: Job) -> list[Problem]:
    """For targets whose nodes see the client's files: is the script there?"""
    if job.is_module or "--no-python" in job.flags:
        return []
    if (Path(job.working_dir) / job.script).is_file():
        return []
    return [Problem("SCRIPT", "no such file", "give the path of your script", job.script)]


def variable_problems(job: Job) -> list[Problem]:
    """Names that are no variables' would be read as something else by a shell."""
    rule, remedy = "not the name of a variable", "letters, digits and underscores"
    names = [name for name, _ in (*job.environment, *job.secrets)]
    return [Problem("--env", rule, remedy, n) for n in names if not _VARIABLE.fullmatch(n)]


def shape_problems(job: Job) -> list[Problem]:
    """Numbers that contradict each other, and variables that are none."""
    found = variable_problems(job)
    if job.max_nodes < job.num_nodes:
        rule = "the most nodes are fewer than the fewest"
        value = f"{job.num_nodes}:{job.max_nodes}"
        found.append(Problem("--nnodes", rule, f"--nnodes {job.max_nodes}:{job.num_nodes}", value))
    if 0 < job.gpus_per_node < job.processes_per_node:
        rule = f"more processes than the {job.gpus_per_node} GPUs asked for"
        remedy = f"--gpus-per-node {job.processes_per_node}, or fewer processes"
        found.append(Problem("--nproc-per-node", rule, remedy, job.processes_per_node))
    if job.time_limit_s is not None and job.time_limit_s <= job.grace_s:
        rule = f"no longer than the {job.grace_s:g} s that saving may take (--grace-period)"
        found.append(Problem("--time", rule, "ask for more time", f"{job.time_limit_s} s"))
    return found
