"""Jobs and options as users would ask for them; golden files and wrong inputs start from these."""

from __future__ import annotations

import dataclasses
from typing import Any

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes import Kubernetes

JOB = Job(
    name="gpt",
    script="train.py",
    script_args=("max_steps=1000", "global_batch_size=512"),
    flags=("--stall-timeout=120",),
    run_dir="/home/me/project/runs/gpt",
    working_dir="/home/me/project",
    num_nodes=2,
    max_nodes=2,
    processes_per_node=8,
    gpus_per_node=8,
    time_limit_s=7200,
    grace_s=60.0,
    environment=(("NCCL_DEBUG", "WARN"),),
    owner="me@desk",
)
TARGET = Kubernetes(
    image="registry.example.com/team/gpt:1.4.2",
    workdir="/app",
    namespace="training",
    claim="runs",
    cpus="64",
    memory="512Gi",
    shm="64Gi",
    node_selector=("gpu.example.com/model=h100",),
    toleration=("nvidia.com/gpu=present:NoSchedule",),
    priority_class="research",
    secret=("wandb",),
    pull_secret="registry",  # noqa: S106 - the name of one
    service_account="trainer",
)
CPU_JOB = dataclasses.replace(
    JOB, gpus_per_node=0, processes_per_node=2, time_limit_s=None, environment=(), flags=()
)
CPU_TARGET = Kubernetes(image="digits:1", claim="runs")
RAY_TARGET = dataclasses.replace(CPU_TARGET, kind="rayjob", ray_version="2.53.0")
STORE_JOB = dataclasses.replace(
    CPU_JOB, script_args=("checkpoint.directory=s3://runs/gpt", "max_steps=10")
)
STORE_TARGET = Kubernetes(image="digits:1", secret=("store-keys",))


def changed(value: Any, **changes: Any) -> Any:
    return dataclasses.replace(value, **changes)
