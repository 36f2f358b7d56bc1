"""What goes to Slurm and what comes back, as text: golden scripts, and outputs of real tools."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem
from drivetrain.launch.job import Job
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets import slurm
from drivetrain.launch.targets.slurm import Slurm

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"

SMALL = Job(
    name="digits",
    script="examples/digits.py",
    script_args=("max_steps=40",),
    flags=(),
    run_dir="/shared/runs/digits",
    working_dir="/shared/code",
    num_nodes=2,
    max_nodes=2,
    processes_per_node=2,
)
LARGE = dataclasses.replace(
    SMALL,
    name="gpt",
    script="examples/gpt.py",
    script_args=("--title", "it's mine", "$HOME"),
    flags=("--stall-timeout=300",),
    num_nodes=4,
    max_nodes=8,
    processes_per_node=8,
    gpus_per_node=8,
    time_limit_s=24 * 3600,
    grace_s=120.0,
    environment=(("NCCL_DEBUG", "WARN"), ("NOTE", "two words")),
)
CASES = {
    "small": (SMALL, Slurm(python="/shared/venv/bin/python")),
    "large": (
        LARGE,
        Slurm(
            partition="gpu",
            account="research",
            qos="high",
            constraint="a100&ib",
            cpus_per_node=96,
            mem="0",
            exclusive=True,
            container_image="/images/train.sqsh",
            container_mounts=("/data",),
            setup=("module load cuda",),
            sbatch=("--mail-type=END",),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_the_golden_ones(name: str) -> None:
    job, target = CASES[name]
    path = GOLDEN / f"{name}.sh"
    text = target.render(job).text
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_shell(name: str) -> None:
    job, target = CASES[name]
    subprocess.run(["bash", "-n"], input=target.render(job).text, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_arguments_reach_the_script_as_they_were_typed(tmp_path: Path) -> None:
    """The script's last command, with srun replaced by something that prints its words."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    job, target = CASES["large"]
    done = subprocess.run(
        ["bash"],
        input=target.render(job).text.replace("module load cuda", ":"),
        text=True,
        check=True,
        capture_output=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"},
    )
    assert done.stdout.splitlines()[-6:] == [
        "--rdzv-id=5-0",
        "examples/gpt.py",
        "--",
        "--title",
        "it's mine",
        "$HOME",
    ]


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("", None),
        ("RUNNING|None|h[1-2]\n", Status(State.RUNNING, "RUNNING", ("h1", "h2"))),
        (
            "PENDING|Resources|\n",
            Status(State.WAITING, "PENDING, Resources: waiting for nodes to be free"),
        ),
        ("PENDING|SomethingNew|\n", Status(State.WAITING, "PENDING, SomethingNew")),
        ("TELEPORTED|None|\n", Status(State.UNKNOWN, "TELEPORTED")),
    ],
)
def test_squeue_is_read(output: str, status: Status | None) -> None:
    assert slurm.from_squeue(output) == status


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("", None),
        ("COMPLETED|0:0|h[1-2]\n", Status(State.FINISHED, "COMPLETED", ("h1", "h2"), 0)),
        ("CANCELLED by 0|0:15|h1\n", Status(State.STOPPED, "CANCELLED by 0", ("h1",), 143)),
        ("REQUEUED|0:0|h1\nFAILED|5:0|h2\n", Status(State.FAILED, "FAILED", ("h2",), 5)),
    ],
)
def test_sacct_is_read(output: str, status: Status | None) -> None:
    assert slurm.from_sacct(output) == status


def test_scontrol_is_read() -> None:
    """As Slurm 22.05 printed it."""
    status = slurm.from_scontrol((GOLDEN / "scontrol-failed.txt").read_text())
    assert status == Status(State.FAILED, "FAILED, NonZeroExitCode", ("h1", "h2"), 3)
    assert slurm.from_scontrol("slurm_load_jobs error: Invalid job id specified") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("h1", ("h1",)),
        ("gpu[003-005,9],login1", ("gpu003", "gpu004", "gpu005", "gpu9", "login1")),
        ("r[1-2]n", ("r1n", "r2n")),
    ],
)
def test_node_lists_are_expanded(text: str, names: tuple[str, ...]) -> None:
    assert slurm.expand(text) == names


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: fatal: Could not establish a configuration source",
        "sbatch: error: s_p_parse_file: unable to status file /etc/slurm/slurm.conf: No such file",
    ],
)
def test_a_machine_without_a_cluster_is_told_where_to_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    tool = tmp_path / "sbatch"
    tool.write_text(f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match="; run this on a login node of the cluster"):
        slurm._slurm("sbatch", "--parsable", "job.sh")
    tool.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    with pytest.raises(DrivetrainError, match="sbatch: sbatch: error: invalid partition") as caught:
        slurm._slurm("sbatch", "--parsable", "job.sh")
    assert caught.value.exit_code == 1
