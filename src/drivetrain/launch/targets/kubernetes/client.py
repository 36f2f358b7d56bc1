"""The API, through Kubernetes' own client; the only file here that touches a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.core.extras import require
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.kubernetes.manifests import Manifest
from drivetrain.launch.targets.kubernetes.states import status

_API = {
    "job": ("batch/v1", "Job"),
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "rayjob": ("ray.io/v1", "RayJob"),
}
_CONFLICT, _NOT_FOUND = 409, 404
_GONE_WITHIN_S, _POLL_S = 180.0, 1.0
# RayJob has words of its own where others have conditions.
_RAY_STATES = {"SUCCEEDED": "Complete", "FAILED": "Failed", "STOPPED": "Failed"}


def connect(namespace: str, context: str | None) -> Client:
    """By the kubeconfig, or from inside a pod by its ServiceAccount."""
    config: Any = require("kubernetes.config", extra="kubernetes")
    client: Any = require("kubernetes.client", extra="kubernetes")
    try:
        try:
            config.load_kube_config(context=context)
        except config.ConfigException:
            if context is not None:
                raise
            config.load_incluster_config()
        return Client(client.ApiClient(), namespace)
    except config.ConfigException as error:
        remedy = "set KUBECONFIG, or try `kubectl cluster-info`; --dry-run needs no cluster"
        problem = Problem("kubernetes", f"no cluster is known here ({error})", remedy, None, False)
        raise EnvironmentProblem([problem]) from error


class Client:
    """What a run needs of a cluster."""

    def __init__(self, api: Any, namespace: str) -> None:
        client: Any = require("kubernetes.client", extra="kubernetes")
        dynamic: Any = require("kubernetes.dynamic", extra="kubernetes")
        self._api = api
        self._namespace = namespace
        self._errors = client.exceptions.ApiException
        self._core: Any = client.CoreV1Api(api)
        self._objects: Any = dynamic.DynamicClient(api)

    def create(self, objects: Sequence[Manifest]) -> None:
        """All of them, or an error that names the one refused."""
        for body in objects:
            try:
                self._kind(body).create(body=body, namespace=self._namespace)
            except self._errors as error:
                if error.status != _CONFLICT:
                    raise _refused(body, error) from error
                self._delete(body)
                self._wait_until_gone(body)
                self._kind(body).create(body=body, namespace=self._namespace)

    def delete(self, objects: Sequence[Manifest]) -> None:
        """The last made first, so that nothing starts pods again."""
        for body in reversed(objects):
            self._delete(body)

    def status(self, kind: str, name: str) -> Status:
        """What became of it."""
        api_version, kind_name = _API[kind]
        resource = self._objects.resources.get(api_version=api_version, kind=kind_name)
        try:
            found = resource.get(name=name, namespace=self._namespace).to_dict()
        except self._errors as error:
            if error.status == _NOT_FOUND:
                return Status(State.STOPPED, "it is not there any more")
            raise
        selector = f"app.kubernetes.io/instance={name}"
        pods = self._listed(
            self._core.list_namespaced_pod(self._namespace, label_selector=selector)
        )
        events = self._listed(self._core.list_namespaced_event(self._namespace))
        own = [e for e in events if e["involvedObject"].get("name", "").startswith(name)]
        return status(pods, _conditions(found), own)

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """Of the pod with index 0, the newest one if it was replaced."""
        selector = f"app.kubernetes.io/instance={name},batch.kubernetes.io/job-completion-index=0"
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
        if not pods:
            return
        newest = max(pods, key=lambda pod: pod.metadata.creation_timestamp)
        stream = self._core.read_namespaced_pod_log(
            newest.metadata.name, self._namespace, follow=follow, _preload_content=False
        )
        for piece in stream.stream():
            yield piece.decode(errors="replace")

    def _kind(self, body: Manifest) -> Any:
        dynamic: Any = require("kubernetes.dynamic.exceptions", extra="kubernetes")
        try:
            return self._objects.resources.get(api_version=body["apiVersion"], kind=body["kind"])
        except dynamic.ResourceNotFoundError as error:
            remedy = "install its operator there, or use --kind job"
            problem = Problem(
                "--kind", f"the cluster has no {body['apiVersion']}", remedy, body["kind"]
            )
            raise EnvironmentProblem([problem]) from error

    def _delete(self, body: Manifest) -> None:
        try:
            self._kind(body).delete(
                name=body["metadata"]["name"],
                namespace=self._namespace,
                body={"propagationPolicy": "Foreground"},
            )
        except self._errors as error:
            if error.status != _NOT_FOUND:
                raise _refused(body, error) from error

    def _wait_until_gone(self, body: Manifest) -> None:
        deadline = time.monotonic() + _GONE_WITHIN_S
        while time.monotonic() < deadline:
            try:
                self._kind(body).get(name=body["metadata"]["name"], namespace=self._namespace)
            except self._errors as error:
                if error.status == _NOT_FOUND:
                    return
            time.sleep(_POLL_S)

    def _listed(self, answer: Any) -> list[Manifest]:
        """As the API wrote it: with the names its documents use."""
        made: list[Manifest] = self._api.sanitize_for_serialization(answer)["items"]
        return made


def _conditions(found: Manifest) -> list[Manifest]:
    state = found.get("status") or {}
    conditions = list(state.get("conditions") or [])
    if word := _RAY_STATES.get(state.get("jobStatus", "")):
        conditions.append({"type": word, "status": "True", "message": state.get("message", "")})
    return conditions


def _refused(body: Manifest, error: Any) -> EnvironmentProblem:
    import json

    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    remedy = "see `kubectl auth can-i create` and the message; --dry-run shows what was sent"
    return EnvironmentProblem([Problem(body["kind"], message, remedy, body["metadata"]["name"])])
