"""The very command of the rendered pods, run on two hosts as the pods would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes import Kubernetes
from drivetrain.launch.targets.kubernetes.options import in_pods
from drivetrain.testing.hosts import hosts_available, make_hosts
from tests.doctor.planted import clean_environment

REASON = hosts_available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(REASON), reason=REASON or ""),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_pods_command_trains(tmp_path: Path) -> None:
    words = ("max_steps=6", "global_batch_size=32", "record.progress=plain", "record.sinks=[]")
    job = Job(
        "digits", "digits.py", words, (), str(tmp_path / "desk" / "digits"), str(EXAMPLES), 2, 2
    )
    # the volume is mounted at the test's own folder
    target = Kubernetes(image="digits:1", claim="runs", mount_path=str(tmp_path / "volume"))
    assert target.problems(job) == []
    manifest = list(yaml.safe_load_all(target.render(job).text))[1]
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    pipe = subprocess.PIPE
    with make_hosts(manifest["spec"]["parallelism"]) as hosts:
        pods = []
        for host in hosts:
            args = [word.replace("$(POD_IP)", host.address) for word in container["args"]]
            assert container["command"] == ["drivetrain", "train"]
            command = [sys.executable, "-m", *container["command"], *args]
            env = {**clean_environment(), **given}
            pods.append(host.popen(command, env=env, cwd=EXAMPLES, stdout=pipe, stderr=pipe))
        ended = [pod.communicate(timeout=150) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], ended
    assert (Path(in_pods(job, target).run_dir) / "run.yaml").is_file()
    assert "step 6" in ended[0][0] + ended[1][0] + ended[0][1] + ended[1][1], ended
