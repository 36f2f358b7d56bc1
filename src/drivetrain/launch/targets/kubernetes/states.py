"""From the API's pods and events to a status and readable findings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from drivetrain.core.finding import EnvironmentFinding, Severity
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.kubernetes.pod import COMPONENT, SUBMITTER

Object = Mapping[str, Any]

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MOUNT = ("FailedMount", "FailedAttachVolume")
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([\w/-]+(?:\.[\w/-]+)*)")
_TAINT = re.compile(r"untolerated taint \{([^}]*)\}")
_KILLED, _RESUME = 137, 75
_INDEX = "batch.kubernetes.io/job-completion-index"
_DEADLINE = "DeadlineExceeded"
_TIME_IS_UP = (
    "its time limit (--time) was reached, and its pods were asked to save;"
    " drivetrain resume continues from the last checkpoint"
)
_CONDITIONS = {
    "Complete": State.FINISHED,
    "Completed": State.FINISHED,
    "Failed": State.FAILED,
    "FailureTarget": State.FAILED,
    "Suspended": State.WAITING,
}


def findings(pods: Sequence[Object], events: Sequence[Object]) -> list[EnvironmentFinding]:
    """Return what is wrong with a run's pods, each problem once."""
    found = [finding for pod in pods for finding in _pod(pod)]
    found += [finding for event in _newest(events) for finding in _event(event)]
    return found


def status(
    pods: Sequence[Object],
    conditions: Sequence[Object],
    events: Sequence[Object],
    *,
    now: datetime | None = None,
) -> Status:
    """Return the job's status: from its own conditions, or else from its pods."""
    there = current(pods)
    said = [_leaving(pod, now or datetime.now(UTC)) for pod in there if _is_leaving(pod)]
    said += sorted(findings(there, events), key=lambda finding: finding.severity != "error")
    detail = f"{said[0].what} ({said[0].evidence}); {said[0].fix}" if said else ""
    nodes = (pod.get("spec", {}).get("nodeName") for pod in there)
    hosts = tuple(dict.fromkeys(node for node in nodes if node))
    for condition in conditions:
        if condition.get("status") == "True" and condition["type"] in _CONDITIONS:
            return _by_condition(condition, pods, detail, hosts)
    if not there:
        return Status(State.WAITING, detail or "no pod yet")
    phases = {"Leaving" if _is_leaving(pod) else _phase(pod) for pod in there}
    running = phases <= {"Running", "Succeeded"} and "Running" in phases
    return Status(State.RUNNING if running else State.WAITING, detail, hosts)


def _by_condition(
    condition: Object, pods: Sequence[Object], detail: str, hosts: tuple[str, ...]
) -> Status:
    state = _CONDITIONS[condition["type"]]
    code = _exit_code(pods)
    if state is State.FINISHED:
        return Status(state, "", hosts, 0)
    if state is State.WAITING:
        return Status(state, "suspended, for example by a queue", hosts)
    if condition.get("reason") == _DEADLINE and code is None:
        return Status(State.STOPPED, _TIME_IS_UP, hosts, _RESUME)
    reason = condition.get("message") or condition.get("reason", "")
    return Status(state, detail or reason, hosts, code)


def current(pods: Sequence[Object]) -> list[Object]:
    """Return the newest pod of each node: a failed pod is kept after it has been replaced."""
    newest: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: _time(pod["metadata"].get("creationTimestamp"))):
        meta = pod["metadata"]
        newest[(meta.get("labels") or {}).get(_INDEX, meta["name"])] = pod
    return list(newest.values())


def speaker(pods: Sequence[Object]) -> Object | None:
    """Return the pod whose output is the run's: Ray's submitter, or the node with rank 0.

    The rendezvous numbers nodes by their addresses, sorted as text.
    """
    there = current(pods)
    submitters = [pod for pod in there if _component(pod) == SUBMITTER]
    running = [pod for pod in there if _phase(pod) == "Running" and not _is_leaving(pod)]
    chosen = submitters[-1:] or running or there
    return min(chosen, key=lambda pod: pod.get("status", {}).get("podIP") or "~", default=None)


def has_ended(pod: Object) -> bool:
    """True if the pod will print nothing more."""
    return _phase(pod) in ("Succeeded", "Failed")


def current_events(events: Sequence[Object], owner: Object, pods: Sequence[Object]) -> list[Object]:
    """Return the current events: of pods that do not run yet, and of what creates pods."""
    waiting = {pod["metadata"].get("uid") for pod in current(pods) if _phase(pod) == "Pending"}
    pods_made = [_time(pod["metadata"].get("creationTimestamp")) for pod in pods]
    last_made = max(pods_made, default=_time(owner["metadata"].get("creationTimestamp")))
    kept = []
    for event in events:
        about = event.get("involvedObject", {})
        if about.get("kind") == "Pod":
            is_current = about.get("uid") in waiting
        else:
            is_current = _makes_pods(about, owner["metadata"]) and _seen_at(event) >= last_made
        kept += [event] if is_current else []
    return kept


def _makes_pods(about: Object, owner: Object) -> bool:
    """True for the job itself as last started, or an object of its operator."""
    name = owner["name"]
    if about.get("name") == name:
        # an operator's objects have the owner's name, but another kind and uid
        return about.get("uid") == owner.get("uid") or about.get("kind") != owner.get("kind", "Job")
    return str(about.get("name", "")).startswith(f"{name}-")


def _seen_at(event: Object) -> datetime:
    series = (event.get("series") or {}).get("lastObservedTime")
    made = event.get("metadata", {}).get("creationTimestamp")
    return _time(series or event.get("lastTimestamp") or event.get("eventTime") or made)


def _time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase"))


def _component(pod: Object) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get(COMPONENT)
    return found


def _is_leaving(pod: Object) -> bool:
    """True if the pod is being deleted: its phase stays Running, even if its node is lost."""
    return bool(pod["metadata"].get("deletionTimestamp")) and not has_ended(pod)


def _leaving(pod: Object, now: datetime) -> EnvironmentFinding:
    name, until = pod["metadata"]["name"], pod["metadata"]["deletionTimestamp"]
    if now <= _time(until):
        return _finding("leaving", name, "saves and ends", f"until {until}", "nothing", "warning")
    node = pod.get("spec", {}).get("nodeName", "")
    what = "should have ended but has not: its node may be lost"
    fix = (
        f"kubectl get node {node}; once you are sure that machine is off,"
        f" kubectl delete pod {name} --force lets the job replace it"
    )
    return _finding("lost", name, what, f"was due to end by {until}", fix)


def _exit_code(pods: Sequence[Object]) -> int | None:
    codes = [ended["exitCode"] for pod in pods for _, ended in _ended(pod)]
    return next((code for code in codes if code not in (0, _RESUME)), None)


def _pod(pod: Object) -> Iterator[EnvironmentFinding]:
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


def _waiting(name: str, container: Object, waiting: Object) -> Iterator[EnvironmentFinding]:
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL:
        image = container.get("image", "its image")
        fix = (
            f"check that {image} exists (docker manifest inspect) and can be pulled:"
            " --pull-secret NAME for a private registry"
        )
        yield _finding("image", name, "its image cannot be pulled", f"{reason}: {message}", fix)
    elif reason in ("CreateContainerConfigError", "CreateContainerError"):
        fix = "kubectl get secret,configmap: the Secret of --secret must be in this namespace"
        yield _finding("config", name, "cannot be set up", f"{reason}: {message}", fix)
    elif reason == "CrashLoopBackOff":
        fix = f"kubectl logs {name} --previous"
        yield _finding("crash", name, "keeps ending and being restarted", message, fix)


def _terminated(name: str, container: Object, ended: Object) -> Iterator[EnvironmentFinding]:
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        limit = container.get("resources", {}).get("limits", {}).get("memory", "its limit")
        what = "was killed: out of memory"
        fix = (
            "more --memory (--shm counts as part of it), a smaller micro_batch_size,"
            " fewer data.num_workers, or memory.activation_checkpointing=full"
        )
        yield _finding("memory", name, what, f"OOMKilled, exit code {code}, limit {limit}", fix)
    elif code == _KILLED:
        what = "was killed"
        fix = "longer terminationGracePeriodSeconds (--grace-period), or check the machine's log"
        yield _finding("killed", name, what, f"exit code {code}, {ended.get('reason', '')}", fix)
    elif code == _RESUME:
        what = "has saved, and will be restarted"
        yield _finding("preempted", name, what, f"exit code {code}", "nothing", "warning")
    elif code:
        fix = f"kubectl logs {name}"
        yield _finding("failed", name, "failed", f"exit code {code}", fix)


def _unschedulable(name: str, message: str) -> EnvironmentFinding:
    return _finding("scheduling", name, "fits on no machine", message, _why_not(message))


def _why_not(message: str) -> str:
    """Return remedies for the reasons that the scheduler gives."""
    fixes = []
    for _, resource in _INSUFFICIENT.findall(message):
        flag = {"cpu": "--cpus", "memory": "--memory"}.get(resource, "--gpus-per-node")
        fixes.append(f"ask for less {resource} ({flag}), or wait until enough is free")
    for taint in _TAINT.findall(message):
        key, _, value = taint.partition(":")
        text = f"{key.strip()}={value.strip()}" if value.strip() else key.strip()
        fixes.append(f"--toleration {text}")
    if "node affinity/selector" in message or ("didn't match" in message and "selector" in message):
        fixes.append("check --node-selector: kubectl get nodes --show-labels")
    if "persistentvolumeclaim" in message.lower() or "unbound" in message:
        fixes.append("kubectl get pvc: --claim must name one that is Bound")
    return (
        "; ".join(dict.fromkeys(fixes)) or "kubectl describe pod shows the reason for every machine"
    )


def _evicted(state: Object) -> str:
    message = state.get("message", "")
    if "ephemeral" in message:
        return "write to the volume (--claim); or --resource ephemeral-storage=20Gi"
    if "memory" in message:
        return "request the memory it uses (--memory): requested memory is not taken away"
    return "request what it uses (--cpus, --memory), or give it a --priority-class"


def _event(event: Object) -> Iterator[EnvironmentFinding]:
    reason = event.get("reason", "")
    name = event.get("involvedObject", {}).get("name", "")
    message = event.get("message", "")
    if reason in _MOUNT:
        fix = "kubectl get pvc: --claim must exist there, and be ReadWriteMany for several nodes"
        yield _finding("volume", name, "its volume cannot be mounted", message, fix)
    elif reason == "FailedCreate" and "quota" in message:
        fix = "kubectl describe quota; request less, or use another --namespace"
        yield _finding("quota", name, "the namespace's quota is used up", message, fix)
    elif reason == "FailedCreate" and "PodSecurity" in message:
        fix = "leave out --rdma, or use a namespace that allows it"
        yield _finding("security", name, "the namespace does not allow such pods", message, fix)
    elif reason == "FailedCreate":
        kind = str(event.get("involvedObject", {}).get("kind", "job")).lower()
        fix = f"kubectl describe {kind} {name}, and check what the message names"
        yield _finding("creation", name, "its pods cannot be created", message, fix)
    elif reason == "Preempted":
        fix = "nothing: it continues when there is room; --priority-class prevents this"
        what = "was preempted"
        yield _finding("preempted", name, what, message, fix, "warning")


def _newest(events: Iterable[Object]) -> list[Object]:
    """Keep the newest event per reason and object: the kubelet repeats events."""
    latest: dict[tuple[str, str], Object] = {}
    for event in events:
        key = (event.get("reason", ""), event.get("involvedObject", {}).get("name", ""))
        latest[key] = event
    return list(latest.values())


def _finding(
    check: str, pod: str, what: str, evidence: str, fix: str, severity: Severity = "error"
) -> EnvironmentFinding:
    return EnvironmentFinding(check, severity, (pod,), what, " ".join(evidence.split())[:300], fix)
