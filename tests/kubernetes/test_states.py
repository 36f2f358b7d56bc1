"""Pods and events in the API's own form, and the sentence each becomes."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.launch.target import State
from drivetrain.launch.targets.kubernetes.states import findings, status

Object = dict[str, Any]


def pod(name: str = "gpt-1a2b3-0-x7k2p", **state: Any) -> Object:
    return {"metadata": {"name": name}, "spec": {"nodeName": "node-a"}, "status": state}


def container(**state: Any) -> Object:
    return {
        "name": "node",
        "image": "team/gpt:1.4.2",
        "resources": {"limits": {"memory": "512Gi"}},
        **state,
    }


def unschedulable(message: str) -> Object:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return pod(phase="Pending", conditions=[condition])


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(phase="Pending", containerStatuses=[container(state=state)])


def ended(code: int, reason: str = "Error") -> Object:
    state = {"terminated": {"exitCode": code, "reason": reason}}
    return pod(phase="Failed", containerStatuses=[container(state=state)])


def event(reason: str, message: str) -> Object:
    return {"reason": reason, "message": message, "involvedObject": {"name": "gpt-1a2b3"}}


PODS: dict[str, tuple[Object, str, str]] = {
    "image pull": (
        waiting("ImagePullBackOff", 'Back-off pulling image "team/gpt:1.4.2"'),
        "image",
        "--pull-secret",
    ),
    "no such image": (waiting("ErrImagePull", "manifest unknown"), "image", "team/gpt:1.4.2"),
    "missing secret": (
        waiting("CreateContainerConfigError", 'secret "wandb" not found'),
        "config",
        "--secret",
    ),
    "out of memory": (ended(137, "OOMKilled"), "memory", "micro_batch_size"),
    "killed": (ended(137), "killed", "--grace-period"),
    "failed": (ended(5), "failed", "kubectl logs"),
    "too few GPUs": (
        unschedulable(
            "0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) had untolerated"
            " taint {dedicated: inference}. preemption: 0/12 nodes are available."
        ),
        "scheduling",
        "--toleration dedicated=inference",
    ),
    "too little memory": (
        unschedulable("0/3 nodes are available: 3 Insufficient memory."),
        "scheduling",
        "--memory",
    ),
    "selector": (
        unschedulable(
            "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
        ),
        "scheduling",
        "--node-selector",
    ),
    "claim": (
        unschedulable('persistentvolumeclaim "runs" not found'),
        "scheduling",
        "--claim",
    ),
    "evicted": (
        pod(
            phase="Failed",
            reason="Evicted",
            message="The node was low on resource: ephemeral-storage.",
        ),
        "evicted",
        "--claim",
    ),
    "evicted for memory": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        "evicted",
        "--memory",
    ),
}
EVENTS = {
    "volume": (
        event("FailedMount", 'MountVolume.SetUp failed for volume "runs"'),
        "volume",
        "ReadWriteMany",
    ),
    "quota": (
        event("FailedCreate", "pods is forbidden: exceeded quota: gpus"),
        "quota",
        "kubectl describe quota",
    ),
    "security": (
        event("FailedCreate", 'violates PodSecurity "restricted:latest"'),
        "security",
        "--rdma",
    ),
}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_in_trouble_is_a_sentence_with_a_fix(name: str) -> None:
    trouble, check, fix = PODS[name]
    (finding,) = findings([trouble], [])
    assert finding.check == check
    assert finding.hosts == ("gpt-1a2b3-0-x7k2p",)
    assert fix in finding.fix
    assert finding.evidence


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_said_once_however_often_it_comes(name: str) -> None:
    trouble, check, fix = EVENTS[name]
    (finding,) = findings([], [trouble] * 5)
    assert finding.check == check
    assert fix in finding.fix


def test_pods_that_run_or_have_run_are_fine() -> None:
    running = pod(phase="Running", containerStatuses=[container(state={"running": {}})])
    assert findings([running, ended(0, "Completed")], []) == []


def test_a_pod_that_saved_is_no_error() -> None:
    (finding,) = findings([ended(75)], [])
    assert finding.severity == "warning"


def test_the_state_of_the_job() -> None:
    running = pod(phase="Running")
    assert status([], [], []).state is State.WAITING
    assert status([running], [], []).state is State.RUNNING
    assert status([running], [], []).hosts == ("node-a",)
    stuck = status([running, waiting("ImagePullBackOff", "x")], [], [])
    assert stuck.state is State.WAITING
    assert "its image cannot be pulled" in stuck.detail
    done = [{"type": "Complete", "status": "True"}]
    assert status([ended(0)], done, []).state is State.FINISHED
    failed = [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]
    over = status([ended(75), ended(137, "OOMKilled")], failed, [])
    assert (over.state, over.exit_code) == (State.FAILED, 137)
