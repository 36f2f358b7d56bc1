"""Command lines that ask for a target, and the files they come to. Nothing is started here."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.launch import submission
from drivetrain.launch.early import nodes_of_step
from drivetrain.launch.job import Job, seconds_of, time_text
from drivetrain.launch.request import Request, read_command, read_request
from drivetrain.launch.target import Rendered, State, Status
from drivetrain.launch.targets.slurm import Slurm


def read(line: str) -> Request:
    request = read_request(line.split())
    assert request is not None
    return request


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_of_job_target_and_script_are_told_apart(desk: Path) -> None:
    request = read(
        "--on slurm --nodes 2 --gpus-per-node 8 --time 2:00:00 --partition main --stall-timeout 90"
        " --run-dir r train.py --lr 0.1 --partition own"
    )
    assert request.target == Slurm(partition="main")
    assert request.job == Job(
        name="train",
        script="train.py",
        script_args=("--lr", "0.1", "--partition", "own"),
        flags=("--stall-timeout=90",),
        run_dir=str(desk / "r"),
        working_dir=str(desk),
        num_nodes=2,
        max_nodes=2,
        processes_per_node=8,
        gpus_per_node=8,
        time_limit_s=7200,
        owner=f"{getpass.getuser()}@{socket.gethostname()}",
    )


def test_flags_may_follow_the_script_until_its_own_begin(desk: Path) -> None:
    request = read("train.py --on slurm --nnodes 2:4 --qos high --dry-run steps=3 --wait")
    assert (request.job.num_nodes, request.job.max_nodes) == (2, 4)
    assert request.target == Slurm(qos="high")
    assert request.job.script_args == ("steps=3", "--wait")
    assert (request.is_dry_run, request.waits) == (True, False)


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--nproc-per-node 2 train.py a=b",
        "train.py --hosts file",
        "train.py --lr 1 --on slurm",
        "train.py -- --on slurm",
    ],
)
def test_words_of_the_script_ask_for_no_target(line: str) -> None:
    assert read_request(line.split()) is None


@pytest.mark.usefixtures("desk")
def test_a_module_names_its_job_and_is_handed_on() -> None:
    job = read("--on slurm -m package.train").job
    assert (job.name, job.flags, job.is_module) == ("train", ("-m",), True)
    assert job.node_argv()[-2:] == ("-m", "package.train")


def test_a_launch_file_holds_flags_and_flags_win(desk: Path) -> None:
    (desk / "launch.yaml").write_text(
        "on: slurm\nnodes: 4\ntime: 2:00:00\npartition: main\nexclusive: true\n"
        "setup: [module load a, module b]\n"
    )
    request = read("--launch-file launch.yaml --nodes 2 train.py")
    assert (request.job.num_nodes, request.job.time_limit_s) == (2, 7200)
    assert request.target == Slurm(
        partition="main", exclusive=True, setup=("module load a", "module b")
    )


def test_a_key_of_a_launch_file_that_is_set_twice_is_named(desk: Path) -> None:
    (desk / "launch.yaml").write_text("on: slurm\nnodes: 4\non: hosts\n")
    with pytest.raises(ConfigError, match="launch.yaml: on is set on line 1 and on line 3; remove"):
        read("--launch-file launch.yaml train.py")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--on slum train.py", "--on = slum: no such target; did you mean slurm?"),
        ("--on slurm --partion x train.py", "--partion: unknown flag; did you mean --partition?"),
        ("--on slurm --nodes two train.py", "--nodes = two: must be a whole number, at least 1"),
        ("--on slurm --nproc-per-node gpu train.py", "--nproc-per-node = gpu: must be a whole"),
        ("--on slurm --time soon train.py", "--time = soon: not a time limit"),
        ("--on slurm --gpus-per-node x train.py", "--gpus-per-node = x: must be a whole"),
        ("--on slurm --env NOT_SET_HERE train.py", "--env = NOT_SET_HERE: this variable is not"),
        ("--on slurm", "SCRIPT: not given"),
        ("--on hosts train.py", "--hosts: not given; write --hosts FILE"),
        ("--hosts nowhere train.py", "--hosts = nowhere: No such file"),
        ("--launch-file nowhere.yaml train.py", "--launch-file = nowhere.yaml"),
    ],
)
@pytest.mark.usefixtures("desk")
def test_what_cannot_be_read_says_why(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(line)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--on slurm gone.py", "SCRIPT = gone.py: no such file"),
        ("--on slurm --nnodes 4:2 train.py", "--nnodes = 4:2: the maximum is less than"),
        (
            "--on slurm --gpus-per-node 2 --nproc-per-node 4 train.py",
            "--nproc-per-node = 4: more processes than the 2 GPUs asked for",
        ),
        ("--on slurm --time 0:30 train.py", "--time = 30 s: must be longer than the 30 s allowed"),
        ("--on slurm --time 0:40 train.py", "--time = 40 s: the signal to save comes 45 s before"),
        ("--on local --nodes 2 train.py", "--nnodes = 2: this machine is one node"),
        ("--on local --time 60 train.py", "--time = 3600 s: there is no scheduler to enforce it"),
    ],
)
@pytest.mark.usefixtures("desk")
def test_what_would_go_wrong_is_known_before(line: str, message: str) -> None:
    request = read(line)
    assert message in "\n".join(map(str, request.target.problems(request.job)))


@pytest.mark.parametrize(
    "line", ["train.py -- --nnodes 3 x", "train.py a=1 --log-dir x", "train.py a=1 b"]
)
@pytest.mark.usefixtures("desk")
def test_a_node_passes_the_script_what_the_client_would(line: str) -> None:
    job = read(f"--on slurm {line}").job
    on_node = read_command(job.node_argv())
    assert (on_node.script_args, on_node.passed_flags) == (job.script_args, ())


@pytest.mark.usefixtures("desk")
def test_flags_of_the_target_that_the_script_gets_are_known() -> None:
    request = read("--on slurm train.py --lr 1 --partition x --nodes 2")
    assert request.passed_flags == ("--partition", "--nodes")
    assert request.job.num_nodes == 1


def test_every_problem_is_told_at_once(desk: Path) -> None:
    request = read("--on slurm --nnodes 4:2 --time 0:10 gone.py")
    assert len(request.target.problems(request.job)) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-2:30:10", 95410),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(time_text(seconds)) == seconds


def test_the_list_of_torchruns_flags_is_torchruns() -> None:
    from torch.distributed.run import get_args_parser

    from drivetrain.launch.command import SWITCHES, WITH_VALUE, _flags

    listed = {**dict.fromkeys(SWITCHES, False), **dict.fromkeys(WITH_VALUE, True)}
    assert _flags(get_args_parser()) == listed


def test_a_desk_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from drivetrain.launch.request import read_request\n"
        "import drivetrain.cli.jobs\n"
        "request = read_request('--on slurm -m package.train'.split())\n"
        "request.target.render(request.job)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Noted(Slurm):
    """Slurm without a cluster."""

    def submit(self, job: Job, rendered: Rendered) -> str:
        return "7"


def test_a_submitted_run_remembers_everything(desk: Path) -> None:
    request = read("--on slurm --run-dir r --env A=b --partition main --setup x train.py a b")
    made = submission.submit(Noted(**vars(request.target)), request.job)
    found = submission.load(desk / "r")
    assert found.target == request.target
    assert (found.job, found.id) == (made.job, "7")
    assert (desk / "r" / "job.sh").read_text() == request.target.render(request.job).text


def test_a_run_that_was_not_submitted_says_so(desk: Path) -> None:
    (desk / "train.py").touch()
    for given in (desk, desk / "train.py"):
        with pytest.raises(ConfigError, match="it has no job.json: the run was not submitted"):
            submission.load(given)
    (desk / "run.yaml").touch()
    with pytest.raises(ConfigError, match="RUN = .*: was started on this machine, not submitted"):
        submission.load(desk)


STEP = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}


def test_a_step_of_two_nodes_is_one_run() -> None:
    variables = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step = nodes_of_step(variables, "/runs/a")
    assert step is not None
    assert (step.num_nodes, step.life) == (2, "12-0-0")
    assert (
        nodes_of_step(
            {**variables, "SLURM_STEP_NUM_NODES": "2"} | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, None
        )
        is None
    )
    assert nodes_of_step({}, None) is None


def test_a_step_with_several_tasks_a_node_is_refused() -> None:
    variables = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8"}
    with pytest.raises(ConfigError) as error:
        nodes_of_step(variables, None)
    assert "srun started 8 supervisors on 2 nodes" in str(error.value)
    assert "--run-dir: the 2 nodes of this step need a shared directory for rendezvous" in str(
        error.value
    )


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_that_was_moved_or_copied_goes_on_where_it_is(
    desk: Path, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Status(State.UNKNOWN, "Slurm no longer knows job 7")
    monkeypatch.setattr(Slurm, "poll", lambda *_: over)  # a cluster that answers
    request = read("--on slurm --run-dir old train.py")
    submission.submit(Noted(**vars(request.target)), request.job)
    (shutil.copytree if is_copied else shutil.move)(desk / "old", desk / "new")
    before = sorted((desk / "old").rglob("*"))
    for given in ("new", str(desk / "new")):
        found = submission.load(given)
        assert found.job == replace(request.job, run_dir=str(desk / "new"))
    submission.submit(Noted(**vars(request.target)), found.job)
    assert f"--run-dir={desk / 'new'}" in (desk / "new" / "job.sh").read_text()
    assert sorted((desk / "old").rglob("*")) == before, "nothing was done there"


def test_a_run_that_is_reached_by_another_name_was_not_moved(desk: Path) -> None:
    request = read("--on slurm --run-dir old train.py")
    submission.submit(Noted(**vars(request.target)), request.job)
    (desk / "link").symlink_to(desk / "old")
    assert submission.load("link").job == request.job
