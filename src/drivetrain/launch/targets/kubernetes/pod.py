"""The pod of one node: its command, resources and permissions. Pure."""

from __future__ import annotations

from typing import Any

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes.options import KubernetesOptions, in_pods, object_name

Manifest = dict[str, Any]

CONTAINER = "node"
MEET_PORT = 29400
COMPONENT, SUBMITTER = "app.kubernetes.io/component", "submitter"
"""The label of the pod that submits a script to Ray, and prints its output."""
_SHM = "/dev/shm"  # noqa: S108 - the mount point itself
# Seconds from the end of saving to the end of the container.
_MARGIN_S = 30


def labels(job: Job) -> dict[str, str]:
    """Return the labels that identify all objects of a run."""
    return {
        "app.kubernetes.io/name": "drivetrain",
        "app.kubernetes.io/instance": object_name(job),
        "app.kubernetes.io/managed-by": "drivetrain",
    }


def pod_spec(job: Job, options: KubernetesOptions) -> Manifest:
    """Return the pod's spec; everything but the command is the same for all kinds."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(job),
        # nothing in a pod uses the API
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.run_as_user,
            "runAsGroup": options.run_as_user,
            "fsGroup": options.run_as_user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(job, options)],
        "volumes": _volumes(options),
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    if options.node_selector:
        spec["nodeSelector"] = dict(_pair(text) for text in options.node_selector)
    if options.toleration:
        spec["tolerations"] = [toleration(text) for text in options.toleration]
    return spec


def grace_seconds(job: Job) -> int:
    """Return the grace period: longer than the run may take to save."""
    return int(job.grace_s) + _MARGIN_S


def container(job: Job, options: KubernetesOptions) -> Manifest:
    """Return the container of one node's supervisor, whose children are the ranks."""
    argv = in_pods(job, options).node_argv(*_meeting(job, options))
    made: Manifest = {
        "name": CONTAINER,
        "image": options.image,
        "command": ["drivetrain", "train"],
        "args": [escaped(word) for word in argv],
        "env": environment(job),
        "resources": resources(job, options),
        "securityContext": _rights(options),
        "volumeMounts": _mounts(options),
    }
    # the pod's own address, which users cannot know
    made["args"].insert(0, "--local-addr=$(POD_IP)")
    if options.workdir:
        made["workingDir"] = options.workdir
    if options.secret:
        made["envFrom"] = [{"secretRef": {"name": name}} for name in options.secret]
    return made


def _meeting(job: Job, options: KubernetesOptions) -> tuple[str, ...]:
    """Rendezvous in the run directory if there is a volume, else at the first pod."""
    if options.claim or job.num_nodes == 1:
        return ()
    name = object_name(job)
    first = (
        f"{name}-node-0-0.{name}" if options.kind in ("jobset", "trainjob") else f"{name}-0.{name}"
    )
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{MEET_PORT}", f"--rdzv-id={name}")


def escaped(word: str) -> str:
    """Escape dollar signs: Kubernetes expands $(NAME) and turns $$ into $."""
    return word.replace("$", "$$")


def environment(job: Job) -> list[Manifest]:
    """Return the pod's address and the job's variables; secrets are referenced only."""
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    given = [{"name": name, "value": escaped(value)} for name, value in job.environment]
    # a home directory that any user id can write to, for the caches of libraries
    home = {"name": "HOME", "value": "/tmp"}  # noqa: S108
    ours: list[Manifest] = [address, {"name": "PYTHONUNBUFFERED", "value": "1"}, home]
    names = {variable["name"] for variable in given}
    return [variable for variable in ours if variable["name"] not in names] + given


def resources(job: Job, options: KubernetesOptions) -> Manifest:
    """Return requests and limits, which are equal: training nodes must not be shared."""
    amounts: dict[str, str] = {}
    if options.cpus:
        amounts["cpu"] = options.cpus
    if options.memory:
        amounts["memory"] = options.memory
    if job.gpus_per_node:
        amounts[options.gpu_resource] = str(job.gpus_per_node)
    amounts.update(_pair(text) for text in options.resource)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _rights(options: KubernetesOptions) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if options.rdma:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _volumes(options: KubernetesOptions) -> list[Manifest]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}
    runs: Manifest = {"name": "runs", "emptyDir": {}}
    if options.claim:
        runs = {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}}
    return [shm, runs]


def _mounts(options: KubernetesOptions) -> list[Manifest]:
    return [
        {"name": "shm", "mountPath": _SHM},
        {"name": "runs", "mountPath": options.mount_path},
    ]


def toleration(text: str) -> Manifest:
    """Parse KEY[=VALUE][:EFFECT], kubectl's notation for taints."""
    rest, _, effect = text.partition(":")
    key, has_value, value = rest.partition("=")
    made: Manifest = {"key": key, "operator": "Equal" if has_value else "Exists"}
    if has_value:
        made["value"] = value
    if effect:
        made["effect"] = effect
    return made


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value
