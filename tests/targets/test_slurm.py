"""A real Slurm: slurmctld and a slurmd per host, crashed, preempted and cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.testing.hosts import CommandFailed
from tests.support.slurm import SlurmCluster, make_slurm, slurm_available
from tests.targets.running import (
    DRIVETRAIN,
    ENVIRONMENT,
    QUICK,
    ROOT,
    SAVES_ONLY_WHEN_ASKED,
    STEPS,
    WORKLOAD,
    alone,
    assert_same_losses,
    assert_same_weights,
    is_training,
    newest_step,
    processes_of,
    slowly,
    wait_for_step,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_available()), reason=slurm_available() or ""),
]


class Desk:
    """Someone on the login node."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        (folder / "tmp").mkdir()
        self.env = {**ENVIRONMENT, "TMPDIR": str(folder / "tmp")}

    def types(self, *words: str, timeout_s: float = 500) -> str:
        return self.cluster.run(
            [*DRIVETRAIN, *words], env=self.env, cwd=self.folder, timeout_s=timeout_s
        )

    def train(self, *words: str) -> str:
        """Slurm's job id."""
        flags = ("--on=slurm", f"--run-dir={self.run}", "--nodes=2", "--nproc-per-node=2", *QUICK)
        said = self.types("train", *flags, *words)
        assert f"drivetrain logs {self.run} -f" in said
        return str(json.loads((self.run / "job.json").read_text())["id"])

    def restarts(self, job: str) -> int:
        words = self.cluster.run(["scontrol", "show", "job", "-o", job]).split()
        return int(next(w.partition("=")[2] for w in words if w.startswith("Restarts=")))


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with make_slurm(2, gpus_per_node=2, grace_s=20) as made:
        yield made


@pytest.fixture
def desk(cluster: SlurmCluster, tmp_path: Path) -> Desk:
    return Desk(cluster, tmp_path)


@pytest.mark.parametrize("name", ["digits.py", pytest.param("gpt.py", marks=pytest.mark.long)])
@pytest.mark.long
def test_two_nodes_train_what_one_process_trains(desk: Desk, name: str) -> None:
    script = str(ROOT / "examples" / name)
    said = desk.types(
        "train", "--on=slurm", f"--run-dir={desk.run}", "--nodes=2", "--gpus-per-node=2",
        "--env=CUDA_VISIBLE_DEVICES=", *QUICK, "--wait", script, *STEPS,
    )  # fmt: skip
    assert "slurm job 1: 2 nodes × 2 processes, 2 GPUs each" in said
    assert "step 20/20" in said  # followed to its end
    assert desk.types("jobs", str(desk.run)).split()[0] == "finished"
    assert "step 20/20" in desk.types("logs", str(desk.run))
    assert_same_losses(desk.run, alone(desk.folder, script, *STEPS))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("undisturbed"), *WORKLOAD, ranks=4)


@pytest.mark.long
def test_a_crashed_node_requeues_the_job_and_nothing_is_lost(desk: Desk, undisturbed: Path) -> None:
    job = desk.train(*slowly(0.05), *WORKLOAD)
    wait_for_step(desk.run, 10)
    node = desk.cluster.nodes[1]
    desk.cluster.crash(node)
    assert newest_step(desk.run) < 60
    wait_until(lambda: desk.restarts(job) == 1, "requeued")
    desk.cluster.boot(node)
    desk.cluster.wait_for(job, "COMPLETED", 150)
    assert_same_weights(desk.run, undisturbed)


@pytest.mark.long
def test_a_preempted_job_saves_and_goes_on_afterwards(desk: Desk, undisturbed: Path) -> None:
    job = desk.train(*slowly(0.1), *WORKLOAD, SAVES_ONLY_WHEN_ASKED)
    wait_until(lambda: is_training(desk.run), "training")
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1"]
    desk.cluster.run([*urgent, "--output=/dev/null"])
    wait_until(lambda: desk.restarts(job) == 1, "requeued")
    assert 0 < newest_step(desk.run) < 60  # only the preemption could make it save
    desk.cluster.wait_for(job, "COMPLETED", 150)
    assert_same_weights(desk.run, undisturbed)


@pytest.mark.long
@pytest.mark.timeout(400)  # the limit is two minutes, and the run must meet it
def test_a_job_at_its_time_limit_saves_in_time_and_goes_on(desk: Desk, undisturbed: Path) -> None:
    flags = ("--time=2:00", "--grace-period=15", *slowly(0.6))
    job = desk.train(*flags, *WORKLOAD, SAVES_ONLY_WHEN_ASKED)
    wait_until(lambda: desk.restarts(job) >= 1, "requeued", 200)
    assert 0 < newest_step(desk.run) < 60
    desk.cluster.wait_for(job, "COMPLETED", 300)
    assert_same_weights(desk.run, undisturbed)


def test_scancel_leaves_nothing_behind(desk: Desk) -> None:
    job = desk.train(*slowly(0.5), *WORKLOAD)
    wait_until(lambda: is_training(desk.run), "training")
    assert processes_of(desk.run)
    desk.cluster.run(["scancel", job])
    desk.cluster.wait_for(job, "CANCELLED")
    wait_until(lambda: not processes_of(desk.run), "no process left", 30)
    assert desk.types("jobs", str(desk.run)).split()[0] == "stopped"
    assert desk.restarts(job) == 0


@pytest.mark.long
def test_stop_saves_and_resume_goes_on(desk: Desk, undisturbed: Path) -> None:
    desk.train(*slowly(0.1), *WORKLOAD, SAVES_ONLY_WHEN_ASKED)
    wait_until(lambda: is_training(desk.run), "training")
    with pytest.raises(CommandFailed, match="RUN = .*: is (running|waiting) as job 1;"):
        desk.types("resume", str(desk.run))
    assert "asked slurm job 1 to save and stop" in desk.types("stop", str(desk.run))
    assert 0 < newest_step(desk.run) < 60
    assert desk.types("jobs", str(desk.run)).split()[0] == "stopped"
    wait_until(lambda: not processes_of(desk.run), "no process left", 30)
    assert "slurm job 2" in desk.types("resume", str(desk.run))
    desk.cluster.wait_for("2", "COMPLETED", 150)
    assert_same_weights(desk.run, undisturbed)


@pytest.mark.long
def test_inside_an_allocation_srun_starts_one_run(desk: Desk, undisturbed: Path) -> None:
    salloc = ["salloc", "--nodes=2", "srun", "--ntasks-per-node=1", *DRIVETRAIN, "train"]
    flags = [f"--run-dir={desk.run}", "--nproc-per-node=2", *QUICK]
    desk.cluster.run([*salloc, *flags, *WORKLOAD], env=desk.env, timeout_s=500)
    assert_same_weights(desk.run, undisturbed)


@pytest.mark.long
def test_a_failed_script_fails_the_job_and_its_traceback_is_in_the_logs(desk: Desk) -> None:
    script = desk.folder / "fails.py"
    script.write_text("raise ValueError('had enough')\n")
    flags = ["--on=slurm", f"--run-dir={desk.run}", "--nodes=2", "--wait"]
    with pytest.raises(CommandFailed) as failure:
        desk.types("train", *flags, str(script))
    assert "ValueError: had enough" in failure.value.stdout
    assert "failed: FAILED, NonZeroExitCode" in failure.value.stderr
    assert failure.value.returncode == 1


def test_sbatch_refuses_in_its_own_words(desk: Desk) -> None:
    flags = ["--on=slurm", f"--run-dir={desk.run}", "--partition=nowhere"]
    with pytest.raises(CommandFailed, match="error: sbatch: .*invalid partition"):
        desk.types("train", *flags, *WORKLOAD)


def test_without_slurm_the_login_node_is_named(tmp_path: Path) -> None:
    flags = ["--on=slurm", f"--run-dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "train", *flags, *WORKLOAD],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 4
    assert done.stderr.startswith(
        "sbatch: Slurm's commands are not installed on this machine; run this on"
    )
