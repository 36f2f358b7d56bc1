"""What Kubernetes would refuse, or do wrong in silence, is refused at the desk, with a fix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.jobs import CPU_TARGET, JOB, TARGET, changed

# What is changed in a good request, where the problem must be seen, and a word of its remedy.
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "no image": ({}, {"image": None}, "--image", "--image"),
    "image that can change": ({}, {"image": "gpt:latest"}, "--image", "unique tag"),
    "image without a tag": ({}, {"image": "team/gpt"}, "--image", "digest"),
    "unknown kind": ({}, {"kind": "trainJobs"}, "--kind", "did you mean trainjob?"),
    "name without letters": ({"name": "___"}, {}, "--job-name", "--job-name"),
    "name too long": ({"name": "x" * 60}, {}, "--job-name", "--job-name my-run"),
    "namespace": ({}, {"namespace": "My_Team"}, "--namespace", "kubectl get namespace"),
    "memory in GB": ({}, {"memory": "512GB"}, "--memory", "64Gi"),
    "memory without a unit": ({}, {"memory": "512", "shm": "1"}, "--memory", "512Gi"),
    "cpus": ({}, {"cpus": "eight"}, "--cpus", "7500m"),
    "shm larger than memory": ({}, {"shm": "600Gi"}, "--shm", "--memory"),
    "effect of a toleration": (
        {},
        {"toleration": ("nvidia.com/gpu:NoSchedul",)},
        "--toleration",
        "NoSchedule",
    ),
    "node selector": ({}, {"node_selector": ("h100",)}, "--node-selector", "KEY=VALUE"),
    "resource": ({}, {"resource": ("efa",)}, "--resource", "efa=4"),
    "secret as a variable": (
        {"environment": (("WANDB_API_KEY", "abc"),)},
        {},
        "--env",
        "--secret",
    ),
    "secret in an argument": (
        {"script_args": ("--password=hunter2",)},
        {},
        "the script's arguments",
        "Secret",
    ),
    "secret in the argument after its flag": (
        {"script_args": ("--lr", "0.1", "--pass", "hunter2", "a=b")},
        {},
        "the script's arguments",
        "Secret",
    ),
    "secret's content for its name": ({}, {"secret": ("KEY=abc",)}, "--secret", "kubectl create"),
    "nowhere to save": ({}, {"claim": None}, "--claim", "checkpoint.directory=s3://"),
    "mount over /dev/shm": ({}, {"mount_path": "/dev/shm"}, "--mount-path", "/runs"),  # noqa: S108
    "relative mount": ({}, {"mount_path": "runs"}, "--mount-path", "/runs"),
    "path of this machine": (
        {"script": "/home/me/project/train.py"},
        {},
        "SCRIPT",
        "train.py, with --workdir",
    ),
    "elastic job": ({"max_nodes": 4}, {}, "--nnodes", "--nnodes 2"),
    "time shorter than saving": ({"time_limit_s": 60}, {}, "--time", "longer"),
    "root": ({}, {"run_as_user": 0}, "--run-as-user", "1000"),
    "variable's name": ({"environment": (("A-B", "1"),)}, {}, "--env", "underscores"),
    "more processes than GPUs": ({"processes_per_node": 9}, {}, "--nproc-per-node", "8"),
    "rayjob without its version": ({}, {"kind": "rayjob"}, "--ray-version", "--ray-version"),
    "version of Ray": (
        {},
        {"kind": "rayjob", "ray_version": "newest"},
        "--ray-version",
        "the image's",
    ),
    "retries": ({}, {"max_retries": -1}, "--max-retries", "6"),
}


def test_there_are_at_least_fifteen() -> None:
    assert len(WRONG) >= 15
    assert TARGET.problems(JOB) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_refused_with_a_fix(name: str) -> None:
    job, target, where, remedy = WRONG[name]
    problems = changed(TARGET, **target).problems(changed(JOB, **job))
    assert [problem.where for problem in problems] == [where], problems
    assert remedy in problems[0].remedy
    assert problems[0].rule
    assert "abc" not in str(problems[0])
    assert "hunter2" not in str(problems[0])


def test_all_problems_come_at_once() -> None:
    bad = changed(CPU_TARGET, image=None, claim=None, memory="1GB", run_as_user=0)
    assert len(bad.problems(JOB)) == 4
