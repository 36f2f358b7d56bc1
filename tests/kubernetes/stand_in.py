"""A stand-in for the API server: it keeps objects and answers in the API's form, over real HTTP.

Nothing is scheduled or run, nothing is admitted. What it does as the real one: it gives objects a
uid and a time, filters lists by labels, keeps what has finalizers until they are gone, collects
what belongs to a deleted owner, refuses what `refusals` says, and answers 400 for the log of a
container that is being created.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

RESOURCES = {
    "v1": {"Service": "services", "Pod": "pods", "Event": "events"},
    "batch/v1": {"Job": "jobs"},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": "jobsets"},
    "trainer.kubeflow.org/v1alpha1": {
        "TrainJob": "trainjobs",
        "TrainingRuntime": "trainingruntimes",
    },
    "ray.io/v1": {"RayJob": "rayjobs"},
}
IN_USE = "trainer.kubeflow.org/resource-in-use"
NAMESPACE = "/api/v1/namespaces/default"
_SET_BY_SERVER = ("uid", "creationTimestamp", "finalizers", "ownerReferences")


class StandIn(ThreadingHTTPServer):
    """`objects` are by path; `requests` is what was asked, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.refusals: dict[str, tuple[int, str]] = {}
        """'POST /jobs' (method and a piece of the path) → the code and the message."""
        self.log = "step 1 loss 2.0\nstep 2 loss 1.5\n"
        self.logs: dict[str, str | None] = {}
        """By pod; None: its container is being created."""
        self.after_log: dict[str, Any] = {}
        """By pod: called once when its log has been sent."""

    def sent(self) -> list[dict[str, Any]]:
        """The objects without what only a server writes."""
        return [
            {**each, "metadata": {k: v for k, v in each["metadata"].items() if k not in made}}
            for each in self.objects.values()
            for made in [_SET_BY_SERVER]
        ]

    def path_of(self, plural: str) -> str:
        return next(at for at in self.objects if f"/{plural}/" in at)

    def add_pod(self, name: str, job: str, at: str = "2024-05-01T00:00:00Z", **more: Any) -> None:
        """A pod of a job: `index`, `ip`, `phase`, and anything else of its status."""
        labels = {"app.kubernetes.io/instance": job, **more.pop("labels", {})}
        if (index := more.pop("index", None)) is not None:
            labels["batch.kubernetes.io/job-completion-index"] = str(index)
        meta = {"name": name, "uid": f"uid-{name}", "creationTimestamp": at, "labels": labels}
        meta |= more.pop("metadata", {})
        status = {"phase": more.pop("phase", "Running"), "podIP": more.pop("ip", None), **more}
        spec = {"containers": [], "nodeName": "node-a"}
        body = {"metadata": meta, "spec": spec, "status": status}
        self.objects[f"{NAMESPACE}/pods/{name}"] = body

    def remove(self, path: str) -> bool:
        """As DELETE does: what has finalizers stays, what belongs to it goes with it."""
        body = self.objects.get(path)
        if body is None:
            return False
        if body["metadata"].get("finalizers") and not self._released(body):
            body["metadata"].setdefault("deletionTimestamp", "2024-05-01T01:00:00Z")
            return True
        del self.objects[path]
        for at, each in list(self.objects.items()):
            owners = {owner["uid"] for owner in each["metadata"].get("ownerReferences", ())}
            if body["metadata"].get("uid") in owners or "deletionTimestamp" in each["metadata"]:
                self.remove(at)
        return True

    def _released(self, body: dict[str, Any]) -> bool:
        """A runtime is held while a TrainJob refers to it; any other finalizer for ever."""
        refers = any(
            each.get("kind") == "TrainJob"
            and each["spec"]["runtimeRef"]["name"] == body["metadata"]["name"]
            for each in self.objects.values()
        )
        return body["metadata"]["finalizers"] == [IN_USE] and not refers


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.requests.append(f"GET {self.path}")
        if self._is_refused(path):
            return
        if path.endswith("/log"):
            self._log(path.split("/")[-2])
        elif (found := _discovered(path)) is not None:
            self._answer(200, found)
        elif path in self.server.objects:
            self._answer(200, self.server.objects[path])
        elif path.rpartition("/")[2] in ("pods", "events"):
            self._answer(200, self._list(path, query))
        else:
            self._answer(404, {"kind": "Status", "code": 404, "message": "not found"})

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused(self.path.partition("?")[0]):
            return
        path = f"{self.path.partition('?')[0]}/{body['metadata']['name']}"
        if path in self.server.objects:
            self._answer(409, {"kind": "Status", "code": 409, "message": "already exists"})
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body["metadata"] |= {"uid": uuid.uuid4().hex, "creationTimestamp": now}
        if body["kind"] == "TrainingRuntime":
            body["metadata"]["finalizers"] = [IN_USE]
        self.server.objects[path] = body
        self._answer(201, body)

    def do_DELETE(self) -> None:
        self.server.requests.append(f"DELETE {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if self._is_refused(path):
            return
        code = 200 if self.server.remove(path) else 404
        self._answer(code, {"kind": "Status", "code": code})

    def _is_refused(self, path: str) -> bool:
        for refused, (code, message) in self.server.refusals.items():
            method, _, piece = refused.partition(" ")
            if method == self.command and piece in path:
                self._answer(code, {"kind": "Status", "code": code, "message": message})
                return True
        return False

    def _log(self, pod: str) -> None:
        text = self.server.logs.get(pod, self.server.log)
        if text is None:
            why = f'container "node" in pod "{pod}" is waiting to start: ContainerCreating'
            self._answer(400, {"kind": "Status", "code": 400, "message": why})
        else:
            self._send(200, text.encode(), "text/plain")
        if pod in self.server.after_log:
            self.server.after_log.pop(pod)()

    def _list(self, path: str, query: str) -> dict[str, Any]:
        items = [each for at, each in self.server.objects.items() if at.startswith(f"{path}/")]
        selector = unquote(parse_qs(query).get("labelSelector", [""])[0])
        wanted = dict(each.split("=") for each in selector.split(",") if each)
        kept = [each for each in items if wanted.items() <= _labels(each).items()]
        kind = "PodList" if path.endswith("pods") else "EventList"
        return {"kind": kind, "apiVersion": "v1", "metadata": {}, "items": kept}

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        self._send(code, json.dumps(body).encode(), "application/json")

    def _send(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        """Quiet."""


def _labels(body: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = body["metadata"].get("labels", {})
    return found


def _discovered(path: str) -> dict[str, Any] | None:
    if path == "/version":
        return {"major": "1", "minor": "34"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [name.partition("/") for name in RESOURCES if "/" in name]
        made = [
            {
                "name": group,
                "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
            }
            for group, _, version in groups
        ]
        return {"kind": "APIGroupList", "groups": made}
    name = path.removeprefix("/apis/").removeprefix("/api/")
    if name not in RESOURCES:
        return None
    listed = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": True,
            "kind": kind,
            "verbs": ["create", "delete", "get", "list"],
        }
        for kind, plural in RESOURCES[name].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": name, "resources": listed}


@contextmanager
def stand_in() -> Iterator[StandIn]:
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
