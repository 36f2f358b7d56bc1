"""The sbatch script of a job. Pure: text from values."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from drivetrain.launch.job import Job, time_text
from drivetrain.launch.secret_variables import FILE as SECRETS
from drivetrain.launch.targets.slurm.options import Options

LOGS = "logs"
_MARGIN_S = 15
"""Between the end of the time for saving and the time limit: for Slurm's own signalling."""

_BODY = """
# Each life of the job meets in a place of its own.
life=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}

# One supervisor per node: it starts the node's ranks and watches them.
{srun}
code=$?

# 75: asked to stop, and saved. The same job resumes from there, unless it was cancelled meanwhile.
if [ $code -eq 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" 2> /dev/null || echo "saved; not requeued, as asked"
fi
exit $code
"""


def sbatch_script(job: Job, options: Options) -> str:
    """Every line of it, the same for the same job."""
    head = "".join(f"#SBATCH {line}\n" for line in _directives(job, options))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment)
    if job.secrets:  # in a file of the owner's: this one may be read by others
        exports += f". {shlex.quote(f'{job.run_dir}/{SECRETS}')} || exit 1\n"
    setup = "".join(f"{line}\n" for line in options.setup)
    preamble = "".join(f"\n{part}" for part in (exports, setup) if part)
    return f"#!/bin/bash\n{head}{preamble}{_BODY.format(srun=_srun(job, options))}"


def _directives(job: Job, options: Options) -> Iterator[str]:
    nodes = f"{job.num_nodes}-{job.max_nodes}" if job.is_elastic else str(job.num_nodes)
    yield f"--job-name={job.name}"
    yield f"--nodes={nodes}"
    yield "--ntasks-per-node=1"
    if options.cpus_per_node is not None:
        yield f"--cpus-per-task={options.cpus_per_node}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if options.mem is not None:
        yield f"--mem={options.mem}"
    if options.exclusive:
        yield "--exclusive"
    if job.time_limit_s is not None:
        yield f"--time={time_text(job.time_limit_s)}"
    for flag in ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"):
        if (value := getattr(options, flag)) is not None:
            yield f"--{flag}={value}"
    yield f"--signal=USR1@{signal_s(job)}"
    yield "--requeue"
    if job.is_elastic:
        yield "--no-kill"
    yield "--open-mode=append"
    yield f"--chdir={job.working_dir}"
    yield f"--output={job.run_dir}/{LOGS}/slurm-%j.out"
    yield from options.sbatch


def signal_s(job: Job) -> int:
    """How long before its time limit the job is asked to save."""
    return round(job.grace_s) + _MARGIN_S


def _srun(job: Job, options: Options) -> str:
    """One task per node; a node that ends badly is the supervisors' business, not srun's."""
    srun = ["srun", "--kill-on-bad-exit=0"]
    if options.cpus_per_node is not None:  # srun does not take it from the job
        srun.append(f"--cpus-per-task={options.cpus_per_node}")
    if job.is_elastic:
        srun.append("--no-kill")
    if options.container_image is not None:
        mounts = dict.fromkeys((job.working_dir, job.run_dir, *options.container_mounts))
        srun.append(f"--container-image={options.container_image}")
        srun.append(f"--container-mounts={','.join(_mount(path) for path in mounts)}")
        srun.append(f"--container-workdir={job.working_dir}")
    flags, script = _split(job)
    train = [f"{options.interpreter} -m drivetrain train", *flags, '--rdzv-id="$life"', script]
    lines = [*(shlex.quote(word) for word in srun[1:]), " \\\n        ".join(train)]
    return " \\\n    ".join([srun[0], *lines])


def _split(job: Job) -> tuple[list[str], str]:
    """The flags one by one, for a line each, and the script with its arguments."""
    words = [shlex.quote(word) for word in job.node_words()]
    num_script_words = 1 + len(job.script_args)
    return words[:-num_script_words], " ".join(words[-num_script_words:])


def _mount(path: str) -> str:
    return path if ":" in path else f"{path}:{path}"
