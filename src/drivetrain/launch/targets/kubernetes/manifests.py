"""The Kubernetes objects of each kind. Pure; the golden files of the tests show them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drivetrain.launch.job import Job
from drivetrain.launch.targets.kubernetes.options import KubernetesOptions, in_pods, object_name
from drivetrain.launch.targets.kubernetes.pod import (
    COMPONENT,
    CONTAINER,
    MEET_PORT,
    SUBMITTER,
    escaped,
    labels,
    pod_spec,
)
from drivetrain.record.session import RUN_DIR

Manifest = dict[str, Any]

# Exit codes of `drivetrain train` that a restarted pod would only repeat.
_HOPELESS = (2, 3, 4, 6, 7, 8)
_RESUME = 75
# Finished objects are kept for a day, for inspection.
_KEEP_S = 86_400
# The head schedules and runs the driver, but no ranks; the submitter waits for its end.
_HEAD = {"cpu": "2", "memory": "8Gi"}
_HEADS_SHM = "2Gi"
_SUBMITTER = {"cpu": "500m", "memory": "1Gi"}


def objects(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """Return the objects to create, in this order."""
    return _KINDS[options.kind](job, options)


def _job(job: Job, options: KubernetesOptions) -> list[Manifest]:
    name = object_name(job)
    spec = _job_spec(job, options)
    spec["ttlSecondsAfterFinished"] = _KEEP_S
    # pods are found as NAME-INDEX.NAME
    spec["template"]["spec"]["subdomain"] = name
    body = {"apiVersion": "batch/v1", "kind": "Job", **_queued(job, options), "spec": spec}
    return [_service(job, options), body]


def _service(job: Job, options: KubernetesOptions) -> Manifest:
    selector = {"app.kubernetes.io/instance": object_name(job)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        **_metadata(job, options),
        "spec": {
            "clusterIP": "None",
            # peers must be found before all of them are ready
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "meet", "port": MEET_PORT, "protocol": "TCP"}],
        },
    }


def _jobset(job: Job, options: KubernetesOptions) -> list[Manifest]:
    body = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        **_queued(job, options),
        "spec": {**_jobset_spec(job, options), "ttlSecondsAfterFinished": _KEEP_S},
    }
    return [body]


def _jobset_spec(job: Job, options: KubernetesOptions) -> Manifest:
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        # the job itself replaces pods; restarting a failed job would only repeat that
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {"spec": _job_spec(job, options)},
            }
        ],
    }


def _trainjob(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """A TrainJob with its own runtime: a shared one would not have its volumes and policies."""
    name = object_name(job)
    template = _jobset_spec(job, options)
    replicated = template["replicatedJobs"][0]
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated["template"] = {"metadata": {"labels": step}, **replicated["template"]}
    # the operator sets both from numNodes
    for key in ("parallelism", "completions"):
        del replicated["template"]["spec"][key]
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        **_metadata(job, options, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {"mlPolicy": {"numNodes": job.num_nodes}, "template": {"spec": template}},
    }
    spec: Manifest = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": name,
        },
        "trainer": {"numNodes": job.num_nodes},
    }
    body = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        **_queued(job, options),
        "spec": spec,
    }
    return [runtime, body]


def _rayjob(job: Job, options: KubernetesOptions) -> list[Manifest]:
    """The script is the driver; Ray Train places the workers that it creates."""
    inside = in_pods(job, options)
    python = ["python", "-m", job.script] if job.is_module else ["python", job.script]
    worker = _ray_template(job, options)
    head = _ray_template(job, replace(options, shm=_HEADS_SHM))
    head["spec"]["containers"][0]["resources"] = _exactly(_HEAD)
    spec: Manifest = {
        # the submitter gets it as its arguments
        "entrypoint": escaped(shlex.join([*python, *job.script_args])),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "backoffLimit": options.max_retries,
        # JSON is valid YAML, whatever characters the directory's name contains
        "runtimeEnvYAML": json.dumps({"env_vars": {RUN_DIR: inside.run_dir}}),
        "submitterPodTemplate": _submitter(job, options),
        "rayClusterSpec": {
            "rayVersion": options.ray_version,
            # no rank must be placed on it
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": "node",
                    "replicas": job.num_nodes,
                    "minReplicas": job.num_nodes,
                    "maxReplicas": job.max_nodes,
                    "rayStartParams": {},
                    "template": worker,
                }
            ],
        },
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    body = {"apiVersion": "ray.io/v1", "kind": "RayJob", **_queued(job, options), "spec": spec}
    return [body]


def _ray_template(job: Job, options: KubernetesOptions) -> Manifest:
    spec = pod_spec(job, options)
    # KubeRay starts Ray in it and manages it
    del spec["restartPolicy"]
    for key in ("command", "args"):
        del spec["containers"][0][key]
    return {"metadata": {"labels": labels(job)}, "spec": spec}


def _submitter(job: Job, options: KubernetesOptions) -> Manifest:
    """The submitter's pod: KubeRay's default has no security context and no pull secret."""
    template = _ray_template(job, options)
    template["metadata"]["labels"][COMPONENT] = SUBMITTER
    spec = template["spec"]
    spec["restartPolicy"] = "Never"
    del spec["volumes"]
    for key in ("volumeMounts", "envFrom", "workingDir"):
        spec["containers"][0].pop(key, None)
    spec["containers"][0]["resources"] = _exactly(_SUBMITTER)
    return template


def _exactly(amounts: dict[str, str]) -> Manifest:
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _job_spec(job: Job, options: KubernetesOptions) -> Manifest:
    spec: Manifest = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": options.max_retries,
        "podFailurePolicy": {"rules": _failure_rules()},
        # a pod that is still saving must not be replaced yet: two would write to one run
        "podReplacementPolicy": "Failed",
        "template": {"metadata": {"labels": labels(job)}, "spec": pod_spec(job, options)},
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    return spec


def _failure_rules() -> list[Manifest]:
    def codes(values: tuple[int, ...]) -> Manifest:
        return {"containerName": CONTAINER, "operator": "In", "values": list(values)}

    return [
        {"action": "Ignore", "onExitCodes": codes((_RESUME,))},
        {"action": "FailJob", "onExitCodes": codes(_HOPELESS)},
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def _metadata(job: Job, options: KubernetesOptions, more: dict[str, str] | None = None) -> Manifest:
    return {
        "metadata": {
            "name": object_name(job),
            "namespace": options.namespace,
            "labels": {**labels(job), **(more or {})},
        }
    }


def _queued(job: Job, options: KubernetesOptions) -> Manifest:
    """Kueue admits the outermost object; with a label on its pods it would admit those too."""
    queue = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else None
    return _metadata(job, options, queue)


_KINDS: dict[str, Callable[[Job, KubernetesOptions], list[Manifest]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
    "rayjob": _rayjob,
}
