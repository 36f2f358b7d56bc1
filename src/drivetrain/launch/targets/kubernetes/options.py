"""What a user may say about a run on Kubernetes, beside the job itself."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.launch.target import option

KINDS = ("job", "jobset", "trainjob", "rayjob")


@dataclass(frozen=True)
class Options:
    """Every field is a flag of `drivetrain train --on kubernetes`."""

    kind: str = option("job, jobset, trainjob (Kubeflow Trainer v2) or rayjob (KubeRay)", "job")
    image: str | None = option("container image with the script in it, by tag or digest")
    workdir: str | None = option("the script's folder in the image; left out: the image's own")
    namespace: str = option("namespace", "default")
    context: str | None = option("context of the kubeconfig; left out: the current one")
    claim: str | None = option("PersistentVolumeClaim (ReadWriteMany) that holds the runs")
    mount_path: str = option("where it is mounted; the run's directory is below", "/runs")
    cpus: str | None = option("CPUs of each node, for example 8 or 7500m")
    memory: str | None = option("memory of each node, for example 64Gi")
    shm: str = option("size of /dev/shm, a part of the memory", "8Gi")
    gpu_resource: str = option("what GPUs are called there", "nvidia.com/gpu")
    resource: tuple[str, ...] = option("another resource: vpc.amazonaws.com/efa=4", ())
    rdma: bool = option("InfiniBand or EFA: memory may be locked (IPC_LOCK)", False)
    node_selector: tuple[str, ...] = option("label a machine must have: KEY=VALUE", ())
    toleration: tuple[str, ...] = option("taint to put up with: KEY[=VALUE][:EFFECT]", ())
    priority_class: str | None = option("PriorityClass")
    queue: str | None = option("Kueue's LocalQueue")
    secret: tuple[str, ...] = option("Secret whose keys become variables, by its name", ())
    pull_secret: str | None = option("Secret to pull the image with, by its name")
    service_account: str | None = option("ServiceAccount of the pods")
    run_as_user: int = option("user id in the containers", 1000)
    ray_version: str | None = option("rayjob: the version of Ray in the image, such as 2.53.0")
    max_retries: int = option("pods that may fail before the job does; 75 is no failure", 6)
