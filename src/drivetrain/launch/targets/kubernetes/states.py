"""What pods and events say, in sentences: the API's own objects in, findings out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from drivetrain.core.finding import Finding, Severity
from drivetrain.launch.target import State, Status

Object = Mapping[str, Any]

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MOUNT = ("FailedMount", "FailedAttachVolume")
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([\w/-]+(?:\.[\w/-]+)*)")
_TAINT = re.compile(r"untolerated taint \{([^}]*)\}")
_KILLED, _RESUME = 137, 75


def findings(pods: Sequence[Object], events: Sequence[Object]) -> list[Finding]:
    """What is wrong with a run's pods, each thing once."""
    found = [finding for pod in pods for finding in _pod(pod)]
    found += [finding for event in _newest(events) for finding in _event(event)]
    return found


def status(
    pods: Sequence[Object], conditions: Sequence[Object], events: Sequence[Object]
) -> Status:
    """Where the job is: by its own conditions, or else by its pods."""
    said = sorted(findings(pods, events), key=lambda finding: finding.severity != "error")
    detail = f"{said[0].what} ({said[0].evidence}); {said[0].fix}" if said else ""
    hosts = tuple(
        dict.fromkeys(
            pod["spec"]["nodeName"] for pod in pods if pod.get("spec", {}).get("nodeName")
        )
    )
    for condition in conditions:
        if condition.get("status") != "True":
            continue
        if condition["type"] in ("Complete", "Completed"):
            return Status(State.FINISHED, "", hosts, 0)
        if condition["type"] in ("Failed", "FailureTarget"):
            reason = condition.get("message") or condition.get("reason", "")
            return Status(State.FAILED, detail or reason, hosts, _exit_code(pods))
        if condition["type"] in ("Suspended",):
            return Status(State.WAITING, "suspended, as a queue does", hosts)
    phases = {pod.get("status", {}).get("phase") for pod in pods}
    if not pods:
        return Status(State.WAITING, detail or "no pod yet")
    running = phases <= {"Running", "Succeeded"} and "Running" in phases
    return Status(State.RUNNING if running else State.WAITING, detail, hosts)


def _exit_code(pods: Sequence[Object]) -> int | None:
    codes = [ended["exitCode"] for pod in pods for _, ended in _ended(pod)]
    return next((code for code in codes if code not in (0, _RESUME)), None)


def _pod(pod: Object) -> Iterator[Finding]:
    name = pod["metadata"]["name"]
    state = pod.get("status", {})
    if state.get("reason") == "Evicted":
        yield _finding("evicted", name, "was evicted", state.get("message", ""), _evicted(state))
    for condition in state.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield _unschedulable(name, condition.get("message", ""))
    for each in state.get("containerStatuses", []):
        waiting = each.get("state", {}).get("waiting")
        if waiting:
            yield from _waiting(name, each, waiting)
    for each, ended in _ended(pod):
        yield from _terminated(name, each, ended)


def _ended(pod: Object) -> Iterator[tuple[Object, Object]]:
    for each in pod.get("status", {}).get("containerStatuses", []):
        for state in (each.get("state", {}), each.get("lastState", {})):
            if state.get("terminated"):
                yield each, state["terminated"]


def _waiting(name: str, container: Object, waiting: Object) -> Iterator[Finding]:
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL:
        image = container.get("image", "its image")
        fix = (
            f"see that {image} exists (docker manifest inspect) and may be pulled:"
            " --pull-secret NAME for a private registry"
        )
        yield _finding("image", name, "its image cannot be pulled", f"{reason}: {message}", fix)
    elif reason in ("CreateContainerConfigError", "CreateContainerError"):
        fix = "kubectl get secret,configmap: is what --secret names in this namespace?"
        yield _finding("config", name, "cannot be set up", f"{reason}: {message}", fix)
    elif reason == "CrashLoopBackOff":
        fix = f"kubectl logs {name} --previous"
        yield _finding("crash", name, "ends again and again", message, fix)


def _terminated(name: str, container: Object, ended: Object) -> Iterator[Finding]:
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        limit = container.get("resources", {}).get("limits", {}).get("memory", "its limit")
        what = "was killed for want of memory"
        fix = (
            "more --memory (--shm counts as part of it), a smaller micro_batch_size,"
            " fewer data.num_workers, or memory.activation_checkpointing=full"
        )
        yield _finding("memory", name, what, f"OOMKilled, exit code {code}, limit {limit}", fix)
    elif code == _KILLED:
        what = "was killed"
        fix = "longer terminationGracePeriodSeconds (--grace-period), or see the machine's log"
        yield _finding("killed", name, what, f"exit code {code}, {ended.get('reason', '')}", fix)
    elif code == _RESUME:
        what = "has saved, and will be started again"
        yield _finding("preempted", name, what, f"exit code {code}", "nothing", "warning")
    elif code:
        fix = f"kubectl logs {name}"
        yield _finding("failed", name, "failed", f"exit code {code}", fix)


def _unschedulable(name: str, message: str) -> Finding:
    return _finding("scheduling", name, "no machine takes it", message, _why_not(message))


def _why_not(message: str) -> str:
    """The scheduler's reasons, with what a user can do about each."""
    fixes = []
    for _, resource in _INSUFFICIENT.findall(message):
        flag = {"cpu": "--cpus", "memory": "--memory"}.get(resource, "--gpus-per-node")
        fixes.append(f"ask for less {resource} ({flag}), or wait until some is free")
    for taint in _TAINT.findall(message):
        key, _, value = taint.partition(":")
        text = f"{key.strip()}={value.strip()}" if value.strip() else key.strip()
        fixes.append(f"--toleration {text}")
    if "node affinity/selector" in message or ("didn't match" in message and "selector" in message):
        fixes.append("see --node-selector: kubectl get nodes --show-labels")
    if "persistentvolumeclaim" in message.lower() or "unbound" in message:
        fixes.append("kubectl get pvc: --claim must name one that is Bound")
    return "; ".join(dict.fromkeys(fixes)) or "kubectl describe pod shows every machine's reason"


def _evicted(state: Object) -> str:
    message = state.get("message", "")
    if "ephemeral" in message:
        return "write to the volume (--claim); or --resource ephemeral-storage=20Gi"
    if "memory" in message:
        return "ask for the memory it uses (--memory): what is asked for is not taken away"
    return "ask for what it uses (--cpus, --memory), or give it a --priority-class"


def _event(event: Object) -> Iterator[Finding]:
    reason = event.get("reason", "")
    name = event.get("involvedObject", {}).get("name", "")
    message = event.get("message", "")
    if reason in _MOUNT:
        fix = "kubectl get pvc: --claim must exist there, and be ReadWriteMany for several nodes"
        yield _finding("volume", name, "its volume cannot be mounted", message, fix)
    elif reason == "FailedCreate" and "quota" in message:
        fix = "kubectl describe quota; ask for less, or in another --namespace"
        yield _finding("quota", name, "the namespace's quota is used up", message, fix)
    elif reason == "FailedCreate" and "PodSecurity" in message:
        fix = "without --rdma, or a namespace that allows it"
        yield _finding("security", name, "the namespace does not allow such pods", message, fix)
    elif reason == "Preempted":
        fix = "nothing: it goes on when there is room; --priority-class keeps it"
        what = "made way for something more important"
        yield _finding("preempted", name, what, message, fix, "warning")


def _newest(events: Iterable[Object]) -> list[Object]:
    """One of each reason and object: the kubelet repeats itself."""
    latest: dict[tuple[str, str], Object] = {}
    for event in events:
        key = (event.get("reason", ""), event.get("involvedObject", {}).get("name", ""))
        latest[key] = event
    return list(latest.values())


def _finding(
    check: str, pod: str, what: str, evidence: str, fix: str, severity: Severity = "error"
) -> Finding:
    return Finding(check, severity, (pod,), what, " ".join(evidence.split())[:300], fix)
