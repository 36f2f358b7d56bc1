"""Pods and events in the API's own form, and the sentence each becomes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from drivetrain.launch.target import State
from drivetrain.launch.targets.kubernetes.states import current_events, findings, status

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


# What is past, and what is lost ----------------------------------------------------------------

EARLY, LATE = "2024-05-01T00:00:00Z", "2024-05-01T00:10:00Z"
JOB = {"metadata": {"name": "gpt-1a2b3", "uid": "job", "creationTimestamp": EARLY}}


def indexed(made: Object, index: int, at: str, **metadata: Any) -> Object:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    made["metadata"] |= {"creationTimestamp": at, "labels": labels, **metadata}
    made["metadata"]["uid"] = f"{index}-{at}"
    return made


def test_a_run_that_has_recovered_runs_although_its_failed_pod_remains() -> None:
    pods = [
        indexed(ended(1), 0, EARLY),
        indexed(pod(phase="Running"), 0, LATE),
        indexed(pod(phase="Running"), 1, EARLY),
    ]
    found = status(pods, [], [])
    assert found.state is State.RUNNING
    assert found.detail == ""


def test_a_run_whose_only_pod_has_failed_waits_for_the_next() -> None:
    found = status([indexed(ended(1), 0, EARLY)], [], [])
    assert found.state is State.WAITING
    assert "exit code 1" in found.detail


def test_a_pod_on_a_lost_node_does_not_run() -> None:
    lost = indexed(pod(phase="Running"), 0, EARLY, deletionTimestamp=LATE)
    ending = status([lost], [], [], now=datetime.fromisoformat("2024-05-01T00:09:00Z"))
    assert ending.state is State.WAITING
    assert "saves" in ending.detail
    overdue = status([lost], [], [], now=datetime.fromisoformat("2024-05-01T00:11:00Z"))
    assert overdue.state is State.WAITING
    assert "kubectl get node node-a" in overdue.detail


def test_a_reached_time_limit_is_no_failure() -> None:
    limit = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    found = status([indexed(ended(75), 0, EARLY)], limit, [])
    assert (found.state, found.exit_code) == (State.STOPPED, 75)
    assert "drivetrain resume" in found.detail
    assert status([indexed(ended(1), 0, EARLY)], limit, []).state is State.FAILED


def test_pods_that_cannot_be_created_are_said_whatever_the_reason() -> None:
    why = 'serviceaccount "trainer" not found'
    (finding,) = findings([], [event("FailedCreate", why)])
    assert why in finding.evidence
    assert "kubectl describe" in finding.fix


def test_only_events_of_what_is_there_count() -> None:
    here = indexed(pod(phase="Pending"), 0, LATE)
    about = {"kind": "Pod", "name": here["metadata"]["name"], "uid": here["metadata"]["uid"]}
    earlier = {"kind": "Pod", "name": "gpt-1a2b3-0-old", "uid": "gone"}
    of_job = {"kind": "Job", "name": "gpt-1a2b3", "uid": "job"}
    of_child = {"kind": "Job", "name": "gpt-1a2b3-node-0", "uid": "child"}
    of_other = {"kind": "Job", "name": "gpt-1a2b34", "uid": "other"}
    of_life_before = {"kind": "Job", "name": "gpt-1a2b3", "uid": "before"}
    after = "2024-05-01T00:20:00Z"

    def seen(about: Object, at: str, pods: list[Object]) -> bool:
        made = {"reason": "FailedCreate", "involvedObject": about, "lastTimestamp": at}
        return bool(current_events([made], JOB, pods))

    assert seen(about, LATE, [here])
    assert not seen(earlier, LATE, [here])
    assert seen(of_job, after, [here])
    assert seen(of_child, after, [here])
    assert not seen(of_other, after, [here])
    assert not seen(of_life_before, after, [here])
    # a pod has come since: what kept it from coming is over
    assert not seen(of_job, "2024-05-01T00:05:00Z", [here])
    running = indexed(pod(phase="Running"), 0, LATE)
    assert not seen(about, LATE, [running])
