"""The Slurm target: a readable sbatch script, submitted and watched with Slurm's own tools."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem
from drivetrain.launch.job import Job, script_problems, shape_problems, time_text
from drivetrain.launch.ownership import FILE as SECRETS
from drivetrain.launch.tail import tail
from drivetrain.launch.target import Rendered, State, Status, option

# The options of the Slurm target, beyond the job itself.


@dataclass(frozen=True)
class SlurmOptions:
    """Each field is a flag of `drivetrain train --on slurm`, named as in sbatch."""

    partition: str | None = option("partition, or several separated by commas")
    account: str | None = option("account to charge")
    qos: str | None = option("quality of service")
    constraint: str | None = option("features that the nodes must have")
    reservation: str | None = option("reservation to run in")
    nodelist: str | None = option("nodes that the allocation must include")
    exclude: str | None = option("nodes that the allocation must not include")
    cpus_per_node: int | None = option("CPU cores per node; default: Slurm's own")
    mem: str | None = option("memory per node, such as 64G")
    exclusive: bool = option("share the nodes with no other job", False)
    container_image: str | None = option("container image to run in (pyxis plugin)")
    container_mounts: tuple[str, ...] = option(
        "more directories to mount in it: PATH or FROM:TO", ()
    )
    python: str | None = option("Python on the nodes; default: this one, or the container's")
    setup: tuple[str, ...] = option("a shell command to run first, such as 'module load cuda'", ())
    sbatch: tuple[str, ...] = option("any other #SBATCH line, such as --mail-type=END", ())

    @property
    def interpreter(self) -> str:
        """The Python that runs drivetrain on the nodes."""
        return self.python or ("python" if self.container_image is not None else sys.executable)


# The sbatch script of a job. Pure: text from values.

LOGS = "logs"
_MARGIN_S = 15
"""Between the end of the time for saving and the time limit, as Slurm signals with a delay."""

_BODY = """
# Each start of the job has its own rendezvous.
rdzv_id=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}

# One supervisor per node: it starts the node's ranks and watches them.
{srun}
code=$?

# 75: asked to stop, and saved. The same job resumes from there, unless it was cancelled meanwhile.
if [ $code -eq 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID" 2> /dev/null || echo "saved; not requeued, as asked"
fi
exit $code
"""


def sbatch_script(job: Job, options: SlurmOptions) -> str:
    """Return the whole script; the same job gives the same text."""
    head = "".join(f"#SBATCH {line}\n" for line in _directives(job, options))
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.environment)
    if job.secrets:  # in a file that only the owner can read, unlike this one
        exports += f". {shlex.quote(f'{job.run_dir}/{SECRETS}')} || exit 1\n"
    setup = "".join(f"{line}\n" for line in options.setup)
    preamble = "".join(f"\n{part}" for part in (exports, setup) if part)
    return f"#!/bin/bash\n{head}{preamble}{_BODY.format(srun=_srun(job, options))}"


def _directives(job: Job, options: SlurmOptions) -> Iterator[str]:
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
    """Return how many seconds before its time limit the job is asked to save."""
    return round(job.grace_s) + _MARGIN_S


def _srun(job: Job, options: SlurmOptions) -> str:
    """Return the srun command, one task per node; the supervisors, not srun, handle failures."""
    srun = ["srun", "--kill-on-bad-exit=0"]
    if options.cpus_per_node is not None:  # srun does not inherit it from the job
        srun.append(f"--cpus-per-task={options.cpus_per_node}")
    if job.is_elastic:
        srun.append("--no-kill")
    if options.container_image is not None:
        mounts = dict.fromkeys((job.working_dir, job.run_dir, *options.container_mounts))
        srun.append(f"--container-image={options.container_image}")
        srun.append(f"--container-mounts={','.join(_mount(path) for path in mounts)}")
        srun.append(f"--container-workdir={job.working_dir}")
    flags, script = _split(job)
    train = [f"{options.interpreter} -m drivetrain train", *flags, '--rdzv-id="$rdzv_id"', script]
    lines = [*(shlex.quote(word) for word in srun[1:]), " \\\n        ".join(train)]
    return " \\\n    ".join([srun[0], *lines])


def _split(job: Job) -> tuple[list[str], str]:
    """Return the flags, for one line each, and the script with its arguments."""
    argv = [shlex.quote(word) for word in job.node_argv()]
    num_script_args = len(job.script_argv)
    return argv[:-num_script_args], " ".join(argv[-num_script_args:])


def _mount(path: str) -> str:
    return path if ":" in path else f"{path}:{path}"


# Parsing the output of Slurm's tools into a Status. Pure.
#
# squeue lists jobs that are not over; sacct lists all jobs, if accounting is set up; scontrol needs
# no setup and lists jobs of the last minutes too (MinJobAge).

SQUEUE_FORMAT = "%T|%r|%N"
SACCT_FORMAT = "State,ExitCode,NodeList"

_STATES = {
    "PENDING": State.WAITING,
    "CONFIGURING": State.WAITING,
    "REQUEUED": State.WAITING,
    "REQUEUE_FED": State.WAITING,
    "REQUEUE_HOLD": State.WAITING,
    "SPECIAL_EXIT": State.WAITING,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "RESIZING": State.RUNNING,
    "COMPLETED": State.FINISHED,
    "CANCELLED": State.STOPPED,
    "FAILED": State.FAILED,
    "BOOT_FAIL": State.FAILED,
    "DEADLINE": State.FAILED,
    "NODE_FAIL": State.FAILED,
    "OUT_OF_MEMORY": State.FAILED,
    "PREEMPTED": State.FAILED,
    "REVOKED": State.FAILED,
    "TIMEOUT": State.FAILED,
}
_PLAIN_WORDS = {
    "BeginTime": "Slurm starts a requeued job after a pause (cred_expire, two minutes by default)",
    "Resources": "waiting for nodes to be free",
    "Priority": "jobs of higher priority run first",
    "ReqNodeNotAvail": "a node it needs is down or reserved",
    "PartitionTimeLimit": "--time exceeds the partition's limit",
    "QOSMaxNodePerUserLimit": "more nodes than the QOS allows per user",
    "AssocGrpNodeLimit": "more nodes than the account allows",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by a user; release it with scontrol release",
}


def from_squeue(output: str) -> Status | None:
    """Parse `squeue -h -j ID -o FORMAT`; None if it lists nothing."""
    line = output.strip().splitlines()
    if not line:
        return None
    word, reason, nodes = (*line[0].split("|"), "", "")[:3]
    state = _state(word)
    why = "" if reason in ("", "None") else reason
    return Status(state, _detail(word, why), expand(nodes), None)


def from_sacct(output: str) -> Status | None:
    """Parse `sacct -X -n -P -j ID -o FORMAT`; the last line is the job's latest start."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    word, code, nodes = (*lines[-1].split("|"), "", "")[:3]
    return Status(_state(word), _detail(word, ""), expand(nodes), _exit_code(code))


def from_scontrol(output: str) -> Status | None:
    """Parse `scontrol show job -o ID`: fields of the form Key=Value."""
    values = dict(re.findall(r"(\w+)=(\S*)", output))
    if "JobState" not in values:
        return None
    word, reason = values["JobState"], values.get("Reason", "None")
    nodes = values.get("NodeList", "(null)")
    return Status(
        _state(word),
        _detail(word, "" if reason == "None" else reason),
        () if nodes == "(null)" else expand(nodes),
        _exit_code(values.get("ExitCode", "")),
    )


def expand(node_list: str) -> tuple[str, ...]:
    """Expand 'gpu[003-005,9],login1' into the names of its hosts."""
    names: list[str] = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", node_list):
        if not inside:
            names.append(prefix + suffix)
            continue
        for part in inside.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{prefix}{number:0{len(first)}d}{suffix}")
    return tuple(names)


def _state(word: str) -> State:
    """'CANCELLED by 0' is CANCELLED; a state that only a newer Slurm has is UNKNOWN."""
    return _STATES.get(word.partition(" ")[0].rstrip("+"), State.UNKNOWN)


def _detail(word: str, reason: str) -> str:
    plain = _PLAIN_WORDS.get(reason)
    parts = [word, reason if plain is None else f"{reason}: {plain}"]
    return ", ".join(part for part in parts if part)


def _exit_code(text: str) -> int | None:
    """'75:0' → 75, '0:9' → 137."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(number) if int(number or 0) else int(code)


# Slurm as a target: sbatch, squeue, sacct, scontrol and scancel.

_FILE = "job.sh"
_HAS_NO_CLUSTER = re.compile(
    r"resolve_ctls_from_dns_srv|Could not establish a configuration source|"
    r"slurm\.conf: No such file"
)
"""Slurm's tools look for slurm.conf here, then for a controller that serves it."""
_JOB_NAME = re.compile(r"[\w.+:@,=-]+")
_ANSWER_S = 60
_MORE_S = 10.0
"""In addition to the time for saving: for the ranks to end and Slurm to notice."""


@dataclass(frozen=True)
class Slurm(SlurmOptions):
    """Run on a Slurm cluster, submitted from a login node."""

    name: ClassVar[str] = "slurm"

    def problems(self, job: Job) -> list[Problem]:
        """Also refuse a time limit that leaves no time to train before the signal to save."""
        found = [*script_problems(job), *shape_problems(job), *_line_problems(job, self)]
        if job.time_limit_s is not None and job.grace_s < job.time_limit_s <= signal_s(job):
            rule = f"the signal to save comes {signal_s(job)} s before the limit"
            remedy = "ask for more time, or a shorter --grace-period"
            found.append(Problem("--time", rule, remedy, f"{job.time_limit_s} s"))
        return found

    def render(self, job: Job) -> Rendered:
        command = ("sbatch", "--parsable", f"{job.run_dir}/{_FILE}")
        return Rendered(_FILE, sbatch_script(job, self), command)

    def submit(self, job: Job, rendered: Rendered) -> str:
        # sbatch does not create the directory of --output, and the job would end without a message
        (Path(job.run_dir) / LOGS).mkdir(parents=True, exist_ok=True)
        return _slurm(*rendered.command).strip().partition(";")[0]

    def poll(self, job: Job, job_id: str) -> Status:  # noqa: ARG002
        """Ask Slurm's tools in turn, until one knows the job."""
        asks = (
            (from_squeue, ("squeue", "-h", "-j", job_id, "-o", SQUEUE_FORMAT)),
            (from_sacct, ("sacct", "-XnP", "-j", job_id, "-o", SACCT_FORMAT)),
            (from_scontrol, ("scontrol", "show", "job", "-o", job_id)),
        )
        for read, command in asks:
            found = read(_answer(*command) or "")
            if found is not None:
                return found
        _check_that_slurm_answers(job_id)
        return Status(State.UNKNOWN, f"Slurm no longer knows job {job_id}")

    def logs(self, job: Job, job_id: str, *, follow: bool) -> Iterator[str]:
        """Yield what all attempts printed, oldest job first."""
        folder = Path(job.run_dir) / LOGS

        def paths() -> list[Path]:
            return sorted(folder.glob("slurm-*.out"), key=_number)

        def is_over() -> bool:
            state = self.poll(job, job_id).state
            return state.is_over or state is State.UNKNOWN

        return tail(paths, is_over, follow=follow)

    def stop(self, job: Job, job_id: str) -> None:
        """Ask the ranks to save, wait for them, and cancel the job if it still runs."""
        if self.poll(job, job_id).state is State.RUNNING:
            _answer("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            _answer("scancel", "--signal=TERM", job_id)
            deadline_s = time.monotonic() + job.grace_s + _MORE_S
            while time.monotonic() < deadline_s:
                if self.poll(job, job_id).state is not State.RUNNING:
                    return
                time.sleep(0.5)
        _slurm("scancel", job_id)


def _line_problems(job: Job, options: SlurmOptions) -> list[Problem]:
    """Refuse text that would end its line of the script and be run as the next one."""
    found = []
    if not _JOB_NAME.fullmatch(job.name):
        rule = "a name may contain letters, digits and . _ + : @ , = - only"
        found.append(Problem("--job-name", rule, "--job-name my-run", job.name))
    given = {"run_dir": job.run_dir, "working_dir": job.working_dir} | dataclasses.asdict(options)
    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and not text.isprintable() for text in texts):
            where = f"--{name.replace('_', '-')}"
            rule = "contains a line break or another non-printable character"
            found.append(Problem(where, rule, "remove that character", has_value=False))
    return found


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _slurm(*command: str) -> str:
    """Run one of Slurm's tools; return its output, or raise with its error message."""
    done = _run(command)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise _refusal(command[0], said)
    return done.stdout


def _refusal(tool: str, said: str) -> DrivetrainError:
    """The error of a tool that failed: on a machine that belongs to no cluster, say so."""
    if not _HAS_NO_CLUSTER.search(said):
        return DrivetrainError(f"{tool}: {said}")
    rule = "this machine belongs to no Slurm cluster: it has no slurm.conf"
    remedy = "run this on a login node of the cluster"
    return EnvironmentProblem([Problem(tool, rule, remedy, has_value=False)])


def _check_that_slurm_answers(job_id: str) -> None:
    """Raise if the controller is down: then it knows no job at all."""
    done = _run(("squeue", "-h", "-j", job_id))
    if done.returncode and "Invalid job id" not in done.stderr:
        raise _refusal("squeue", done.stderr.strip() or f"exit code {done.returncode}")


def _answer(*command: str) -> str | None:
    """Run one of Slurm's tools; None if it is missing or fails (no accounting, unknown job)."""
    if shutil.which(command[0]) is None:
        return None
    done = _run(command)
    return done.stdout if done.returncode == 0 else None


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except FileNotFoundError:
        rule = "Slurm's commands are not installed on this machine"
        remedy = "run this on a login node of the cluster"
        problem = Problem(command[0], rule, remedy, has_value=False)
        raise EnvironmentProblem([problem]) from None
    except subprocess.TimeoutExpired:
        raise DrivetrainError(f"{command[0]}: no answer within {_ANSWER_S} s") from None
