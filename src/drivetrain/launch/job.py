"""Job: the description of a run that a target receives. Plain values, no side effects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem


@dataclass(frozen=True)
class Job:
    """What to run, on which resources, for how long; the same for every target."""

    name: str
    script: str
    script_args: tuple[str, ...]
    flags: tuple[str, ...]
    """More flags of `drivetrain train` for each node: --live, -m, --stall-timeout=…"""
    run_dir: str
    """Absolute, on storage that all nodes share; the client keeps job.json in it."""
    working_dir: str
    """The client's working directory at submission, in which the nodes start."""
    num_nodes: int = 1
    max_nodes: int = 1
    """If greater than num_nodes, the run is elastic between the two."""
    processes_per_node: int = 1
    gpus_per_node: int = 0
    """GPUs to request from the scheduler; 0: the run needs none."""
    time_limit_s: int | None = None
    grace_s: float = 30.0
    """How long the ranks may take to save once they are asked to stop."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the ranks need and the target would not pass on by itself."""
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Variables that look like secrets: stored in a file that only the owner can read, and never
    rendered. An empty value is not known here."""
    owner: str = ""
    """user@host that first submitted the run, since two users' runs may have the same path."""

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave the run."""
        return self.max_nodes > self.num_nodes

    @property
    def is_module(self) -> bool:
        """Whether the script is a module name instead of a file."""
        return bool({"-m", "--module"} & set(self.flags))

    def node_argv(self, *more_flags: str) -> tuple[str, ...]:
        """Return each node's arguments of `drivetrain train`; `more_flags` come from the target."""
        nodes = f"{self.num_nodes}:{self.max_nodes}" if self.is_elastic else str(self.num_nodes)
        return (
            f"--nnodes={nodes}",
            f"--nproc-per-node={self.processes_per_node}",
            f"--run-dir={self.run_dir}",
            f"--grace-period={self.grace_s:g}",
            *more_flags,
            *self.flags,
            *self.script_argv,
        )

    @property
    def script_argv(self) -> tuple[str, ...]:
        """The script and its arguments, after a `--` if some could be taken for the launcher's."""
        has_flags = any(word.startswith("-") for word in self.script_args)
        return (self.script, *(["--"] if has_flags else []), *self.script_args)


def seconds_of(text: str) -> int:
    """Parse a time limit as Slurm does: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN or D-H:MIN:SEC."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        remedy = "write MINUTES, H:MM:SS or DAYS-HOURS, as in Slurm"
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
    """Format seconds: 7200 → '2:00:00'."""
    minutes, secs = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def script_problems(job: Job) -> list[Problem]:
    """For targets whose nodes see the client's files: check that the script exists."""
    if job.is_module or "--no-python" in job.flags:
        return []
    return missing_script(job.script, Path(job.working_dir))


def missing_script(script: str, working_dir: Path = Path()) -> list[Problem]:
    """Check that a script's file exists, as seen from a directory."""
    path = working_dir / script
    if path.is_file():
        return []
    rule = "a directory, not a script" if path.is_dir() else "no such file"
    return [Problem("SCRIPT", rule, "give the path of your script", script)]


def variable_problems(job: Job) -> list[Problem]:
    """Check variable names: a shell would interpret an invalid one as something else."""
    rule, remedy = "not a valid variable name", "use letters, digits and underscores"
    names = [name for name, _ in (*job.environment, *job.secrets)]
    return [Problem("--env", rule, remedy, n) for n in names if not _VARIABLE.fullmatch(n)]


def shape_problems(job: Job) -> list[Problem]:
    """Check for contradictory numbers and invalid variable names."""
    found = variable_problems(job)
    if job.max_nodes < job.num_nodes:
        rule = "the maximum is less than the minimum"
        value = f"{job.num_nodes}:{job.max_nodes}"
        found.append(Problem("--nnodes", rule, f"--nnodes {job.max_nodes}:{job.num_nodes}", value))
    if 0 < job.gpus_per_node < job.processes_per_node:
        rule = f"more processes than the {job.gpus_per_node} GPUs asked for"
        remedy = f"--gpus-per-node {job.processes_per_node}, or fewer processes"
        found.append(Problem("--nproc-per-node", rule, remedy, job.processes_per_node))
    if job.time_limit_s is not None and job.time_limit_s <= job.grace_s:
        rule = f"must be longer than the {job.grace_s:g} s allowed for saving (--grace-period)"
        found.append(Problem("--time", rule, "ask for more time", f"{job.time_limit_s} s"))
    return found
