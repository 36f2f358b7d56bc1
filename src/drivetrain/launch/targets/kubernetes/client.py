"""The API client, on Kubernetes' own library; the only module here that accesses a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.core.requirements import require
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.kubernetes.manifests import Manifest
from drivetrain.launch.targets.kubernetes.states import (
    current_events,
    has_ended,
    speaker,
    status,
)

_API = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "rayjob": ("ray.io/v1", "RayJob"),
}
# Objects that an operator requires when the job is created; all others are created after it.
_NEEDED_FIRST = ("TrainingRuntime",)
_BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _CONFLICT = 400, 401, 403, 404, 409
_GONE_WITHIN_S, _POLL_S = 180.0, 1.0
# After this long without output of a pod, look up again which pod has rank 0.
_QUIET_S = 60.0
# RayJob has its own states where the others have conditions.
_RAY_STATES = {"SUCCEEDED": "Complete", "FAILED": "Failed", "STOPPED": "Failed"}
_RAY_DEPLOYMENTS = {"Failed": "Failed", "ValidationFailed": "Failed", "Suspended": "Suspended"}
_GONE = (
    "it no longer exists: it was deleted, or ended more than a day ago;"
    " drivetrain status on the run directory shows how it ended"
)


def connect(namespace: str, context: str | None) -> Client:
    """Connect with the kubeconfig or, inside a pod, with its ServiceAccount."""
    config: Any = require("kubernetes.config", extra="kubernetes")
    client: Any = require("kubernetes.client", extra="kubernetes")
    try:
        try:
            config.load_kube_config(context=context)
        except config.ConfigException:
            if context is not None:
                raise
            config.load_incluster_config()
    except config.ConfigException as error:
        remedy = "set KUBECONFIG, or try `kubectl cluster-info`; --dry-run needs no cluster"
        problem = Problem(
            "kubernetes", f"no cluster is configured here ({error})", remedy, None, False
        )
        raise EnvironmentProblem([problem]) from error
    api = client.ApiClient()
    with _plainly(api):
        return Client(api, namespace)


class Client:
    """The operations of a run on a cluster."""

    def __init__(self, api: Any, namespace: str) -> None:
        client: Any = require("kubernetes.client", extra="kubernetes")
        dynamic: Any = require("kubernetes.dynamic", extra="kubernetes")
        self._api = api
        self._namespace = namespace
        self._errors = client.exceptions.ApiException
        self._core: Any = client.CoreV1Api(api)
        self._objects: Any = dynamic.DynamicClient(api)

    def create(self, objects: Sequence[Manifest]) -> None:
        """Create the run's job (the last object) and what belongs to it; all or nothing."""
        *others, job = objects
        with _plainly(self._api):
            self._make_way(job)
            made: list[Manifest] = []
            try:
                for body in (each for each in others if each["kind"] in _NEEDED_FIRST):
                    self._replace(body, made)
                owner = _owner(self._replace(job, made))
                for body in (each for each in others if each["kind"] not in _NEEDED_FIRST):
                    self._replace(_owned(body, owner), made)
            except BaseException:
                with suppress(Exception):  # report the first error
                    self.delete(made)
                raise

    def delete(self, objects: Sequence[Manifest]) -> None:
        """Delete in reverse order, so that nothing restarts pods."""
        with _plainly(self._api):
            for body in reversed(objects):
                self._delete(body)

    def status(self, kind: str, name: str) -> Status:
        api_version, kind_name = _API[kind]
        with _plainly(self._api):
            found = self._find(api_version, kind_name, name)
            if found is None:
                return Status(State.UNKNOWN, _GONE)
            child = None
            if kind in ("jobset", "trainjob"):
                child = self._find("batch/v1", "Job", f"{name}-node-0")
            pods = self._pods(name)
            events = current_events(self._listed("Event"), {"kind": kind_name, **found}, pods)
        conditions = [*(_conditions(child) if child else ()), *_conditions(found)]
        made = status(pods, conditions, events)
        if "deletionTimestamp" in found["metadata"] and not made.state.is_over:
            return Status(
                State.RUNNING, "is being deleted: its pods are saving and ending", made.hosts
            )
        return made

    def logs(self, kind: str, name: str, *, follow: bool) -> Iterator[str]:
        """Yield the output of the pod with rank 0 and of its successors until the run is over."""
        num_seen: dict[str, int] = {}
        finished: set[str] = set()
        while True:
            # checked before the log is read, so that the last output is included
            is_over = not follow or not self._goes_on(kind, name)
            with _plainly(self._api):
                pod = speaker(self._pods(name))
            uid = pod["metadata"].get("uid", "") if pod else ""
            if pod is not None and uid not in finished:
                if has_ended(pod):
                    finished.add(uid)
                for piece in self._log(pod, follow=not is_over, skip=num_seen.get(uid, 0)):
                    num_seen[uid] = num_seen.get(uid, 0) + len(piece)
                    yield piece.decode(errors="replace")
            if is_over:
                return
            time.sleep(_POLL_S)

    def _goes_on(self, kind: str, name: str) -> bool:
        return self.status(kind, name).state in (State.WAITING, State.RUNNING)

    def _log(self, pod: Mapping[str, Any], *, follow: bool, skip: int) -> Iterator[bytes]:
        """Yield a pod's output after `skip` bytes; nothing while it is being created."""
        urllib3: Any = require("urllib3", extra="kubernetes")
        with _plainly(self._api):
            try:
                stream = self._core.read_namespaced_pod_log(
                    pod["metadata"]["name"],
                    self._namespace,
                    follow=follow,
                    _preload_content=False,
                    _request_timeout=_QUIET_S,
                )
            except self._errors as error:
                if error.status in (_BAD_REQUEST, _NOT_FOUND):  # not there yet, or no longer
                    return
                raise
            # if the connection breaks or goes silent, the caller opens another
            with suppress(urllib3.exceptions.HTTPError):
                for piece in stream.stream():
                    if rest := piece[skip:]:
                        yield rest
                    skip = max(0, skip - len(piece))

    def _make_way(self, job: Manifest) -> None:
        """Delete what an earlier start of the run has left; refuse if it is still running."""
        kind = next(word for word, (_, name) in _API.items() if name == job["kind"])
        name = job["metadata"]["name"]
        self._kind(job)  # fails without its operator
        found = self._find(job["apiVersion"], job["kind"], name)
        if found is None:
            return
        if "deletionTimestamp" not in found["metadata"]:
            state = self.status(kind, name).state
            if not state.is_over:
                rule = f"is {state} there; submitting it again would end it"
                remedy = f"kubectl delete {kind} {name} --namespace {self._namespace} ends it"
                raise EnvironmentProblem([Problem(job["kind"], rule, remedy, name)])
            self._delete(job)
        self._wait_until_gone(job)

    def _replace(self, body: Manifest, made: list[Manifest]) -> Manifest:
        """Create an object, replacing what an earlier start of the run has left."""
        try:
            created = self._kind(body).create(body=body, namespace=self._namespace)
        except self._errors as error:
            if error.status != _CONFLICT:
                raise _refused(error, body) from error
            self._delete(body)
            self._wait_until_gone(body)
            created = self._kind(body).create(body=body, namespace=self._namespace)
        made.append(body)
        found: Manifest = created.to_dict()
        return found

    def _kind(self, body: Manifest) -> Any:
        dynamic: Any = require("kubernetes.dynamic.exceptions", extra="kubernetes")
        try:
            return self._objects.resources.get(api_version=body["apiVersion"], kind=body["kind"])
        except dynamic.ResourceNotFoundError as error:
            remedy = "install its operator in the cluster, or use --kind job"
            problem = Problem(
                "--kind", f"the cluster has no {body['apiVersion']}", remedy, body["kind"]
            )
            raise EnvironmentProblem([problem]) from error

    def _find(self, api_version: str, kind: str, name: str) -> Manifest | None:
        resource = self._kind({"apiVersion": api_version, "kind": kind})
        try:
            found: Manifest = resource.get(name=name, namespace=self._namespace).to_dict()
        except self._errors as error:
            if error.status != _NOT_FOUND:
                raise
            return None
        return found

    def _delete(self, body: Manifest) -> None:
        try:
            self._kind(body).delete(
                name=body["metadata"]["name"],
                namespace=self._namespace,
                body={"propagationPolicy": "Foreground"},
            )
        except self._errors as error:
            if error.status != _NOT_FOUND:
                raise _refused(error, body) from error

    def _wait_until_gone(self, body: Manifest) -> None:
        deadline = time.monotonic() + _GONE_WITHIN_S
        name = body["metadata"]["name"]
        while (found := self._find(body["apiVersion"], body["kind"], name)) is not None:
            if time.monotonic() > deadline:
                held = ", ".join(found["metadata"].get("finalizers") or ["its pods"])
                rule = f"is still being deleted, held by {held}"
                remedy = f"kubectl describe {body['kind'].lower()} {name}; then submit it again"
                raise EnvironmentProblem([Problem(body["kind"], rule, remedy, name)])
            time.sleep(min(_POLL_S, _GONE_WITHIN_S))

    def _pods(self, name: str) -> list[Manifest]:
        return self._listed("Pod", f"app.kubernetes.io/instance={name}")

    def _listed(self, kind: str, selector: str | None = None) -> list[Manifest]:
        resource = self._kind({"apiVersion": "v1", "kind": kind})
        answer = resource.get(namespace=self._namespace, label_selector=selector)
        found: list[Manifest] = answer.to_dict()["items"]
        return found


def _owner(created: Manifest) -> Manifest:
    return {
        "apiVersion": created["apiVersion"],
        "kind": created["kind"],
        "name": created["metadata"]["name"],
        "uid": created["metadata"]["uid"],
    }


def _owned(body: Manifest, owner: Manifest) -> Manifest:
    """Set an owner: the cluster deletes the object when its owner is deleted."""
    return {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}


def _conditions(found: Manifest) -> list[Manifest]:
    state = found.get("status") or {}
    conditions = list(state.get("conditions") or [])
    deployment = state.get("jobDeploymentStatus") or ""
    word = _RAY_STATES.get(state.get("jobStatus") or "") or _RAY_DEPLOYMENTS.get(deployment)
    if word and deployment != "Retrying":  # then it restarts
        message = state.get("message") or state.get("reason") or ""
        conditions.append({"type": word, "status": "True", "message": message})
    return conditions


@contextmanager
def _plainly(api: Any) -> Iterator[None]:
    """Turn an API error or a missing answer into a message with a remedy."""
    client: Any = require("kubernetes.client", extra="kubernetes")
    urllib3: Any = require("urllib3", extra="kubernetes")
    try:
        yield
    except client.exceptions.ApiException as error:
        raise _refused(error) from error
    except urllib3.exceptions.HTTPError as error:
        reason = str(getattr(error, "reason", None) or error).rpartition(": ")[2]
        rule = f"no API server answers at {api.configuration.host} ({reason})"
        remedy = "try `kubectl cluster-info`; --dry-run needs no cluster"
        raise EnvironmentProblem([Problem("kubernetes", rule, remedy, None, False)]) from error


def _refused(error: Any, body: Manifest | None = None) -> EnvironmentProblem:
    """Return the error with the server's message and a remedy."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    message = " ".join(message.split())
    if error.status == _UNAUTHORIZED:
        rule = f"the API server rejects your credentials (401: {message})"
        remedy = "log in again, and check that `kubectl auth whoami` works"
    elif error.status == _FORBIDDEN:
        rule = f"the API server does not allow it (403: {message})"
        remedy = (
            "see the message; the Role in deploy/kustomize/base/access.yaml has all that is needed"
        )
    elif error.status >= 500:
        rule = f"the API server failed ({error.status}: {message})"
        remedy = "try again later"
    else:
        rule, remedy = message, "look at what was sent with --dry-run"
    if body is None:
        return EnvironmentProblem([Problem("kubernetes", rule, remedy, None, False)])
    return EnvironmentProblem([Problem(body["kind"], rule, remedy, body["metadata"]["name"])])
