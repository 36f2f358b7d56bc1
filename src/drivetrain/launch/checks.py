"""What can be known to be wrong with a job before anything is submitted."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.core.errors import Problem
from drivetrain.launch.job import Job

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def script_problems(job: Job) -> list[Problem]:
    """For targets whose nodes see the desk's files: is the script there?"""
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
