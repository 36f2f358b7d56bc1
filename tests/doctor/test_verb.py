"""`drivetrain doctor` as a user types it: here, on the hosts of a file, by meeting in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing.hosts import Host, hosts_available, make_hosts
from drivetrain.testing.ssh import ssh_available, start_sshd
from tests.doctor.planted import clean_environment
from tests.support.slurm import make_slurm, slurm_available

VERB = [sys.executable, "-m", "drivetrain", "doctor"]
REASON = hosts_available()
on_hosts = pytest.mark.skipif(bool(REASON), reason=REASON or "")


def doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(), **variables}
    return subprocess.run([*VERB, *words], capture_output=True, text=True, check=False, env=env)


def test_this_host_alone(tmp_path: Path) -> None:
    result = doctor("--run-dir", str(tmp_path / "new" / "run"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no problems found" in result.stdout
    assert list(tmp_path.iterdir()) == []  # and nothing is left


def test_the_words_of_a_train_command_are_examined(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("parallel: {timeout_s: 30}\n")
    result = doctor("--json", "--", "train.py", "--config", str(config))
    assert result.returncode == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["evidence"] == "--stall-timeout 60 ≥ parallel.timeout_s 30"
    overridden = doctor("--json", "--", "train.py", f"--config={config}", "parallel.timeout_s=90")
    assert overridden.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "/nowhere"], "--hosts = /nowhere: No such file or directory; give a file"),
        (["--cluster", "/nowhere"], "--cluster = /nowhere: neither a file nor a name"),
        (["--port", "70000"], "--port = 70000: not a port number; use 1 to 65535"),
        (["--meet", "meet"], "--members: number of hosts unknown; give --members N"),
        (["--", "--stall-timeout", "soon"], "--stall-timeout = soon: must be a number of seconds"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    result = doctor(*words)
    assert result.returncode == 2
    assert said in result.stderr


@on_hosts
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(bool(ssh_available()), reason=ssh_available() or "")
def test_hosts_of_a_file_over_ssh(tmp_path: Path) -> None:
    names = tmp_path / "hosts.txt"
    with make_hosts(3) as (desk, *machines), start_sshd(machines) as ssh:
        words = ["--hosts", str(names), "--ssh", ssh, "--run-dir", str(tmp_path)]
        names.write_text("# the lab\nh2 slots=8\nh3 slots=8  # both alike\n")
        good = doctor_on(desk, *words)
        assert good.returncode == 0, good.stdout + good.stderr
        assert "2 of 2 links between hosts work" in good.stdout
        names.write_text("h2\nh3\nh9\n")
        lost = doctor_on(desk, *words)
    assert lost.returncode == 1
    assert "error: h9: cannot be examined" in lost.stdout
    assert "2 of 2 links between hosts work" in lost.stdout  # the others are examined all the same


def doctor_on(desk: Host, *words: str) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with desk.popen([*VERB, *words], env=clean_environment(), stdout=pipe, stderr=pipe) as process:
        stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


@on_hosts
@pytest.mark.slow
def test_members_of_a_job_meet_in_a_folder(tmp_path: Path) -> None:
    env = {**clean_environment(), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3"}
    pipe = subprocess.PIPE
    command = [*VERB, "--meet", str(tmp_path / "meet"), "--run-dir", str(tmp_path), "--json"]
    with make_hosts(3) as hosts:
        members = [host.popen(command, env=env, stdout=pipe, stderr=pipe) for host in hosts]
        ended = [member.communicate(timeout=120) for member in members]
    assert [member.returncode for member in members] == [0, 0, 0], ended
    report = json.loads(ended[0][0])
    assert [host["name"] for host in report["examination"]["hosts"]] == ["h1", "h2", "h3"]
    assert len(report["examination"]["links"]) == 6
    assert report["findings"] == []
    assert [stdout for stdout, _ in ended[1:]] == ["", ""]
    assert list((tmp_path / "meet").iterdir()) == []


@on_hosts
@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_available()), reason=slurm_available() or "")
@pytest.mark.long
def test_nodes_of_a_real_slurm_job_meet_in_a_folder(tmp_path: Path) -> None:
    step = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    words = ["--on", "slurm", "--meet", str(tmp_path / "meet"), "--run-dir", str(tmp_path)]
    with make_slurm(2) as cluster:
        good = cluster.run([*step, *VERB, *words])
        bare = ["sh", "-c", 'unset SLURM_PROCID; "$@"; true', "sh"]
        bad = cluster.run([*step, *bare, *VERB, *words])
    assert "2 of 2 links between hosts work" in good
    assert "no problems found" in good
    assert "error: h1, h2: SLURM_PROCID is not set" in bad
