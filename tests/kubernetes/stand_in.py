"""A stand-in for the API server: it keeps objects and answers in the API's form, over real HTTP.

Nothing is scheduled or run, nothing is admitted or defaulted. What it shows is that the client's
requests go to the right paths with the right bodies; it is no proof of a cluster's behaviour.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


class StandIn(ThreadingHTTPServer):
    """`objects` are by path; `requests` is what was asked, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.log = "step 1 loss 2.0\nstep 2 loss 1.5\n"


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.requests.append(f"GET {self.path}")
        if path.endswith("/log"):
            self._send(200, self.server.log.encode(), "text/plain")
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
        path = f"{self.path.partition('?')[0]}/{body['metadata']['name']}"
        if path in self.server.objects:
            self._answer(409, {"kind": "Status", "code": 409, "message": "already exists"})
            return
        self.server.objects[path] = body
        self._answer(201, body)

    def do_DELETE(self) -> None:
        self.server.requests.append(f"DELETE {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = self.server.objects.pop(self.path.partition("?")[0], None)
        self._answer(200 if found else 404, {"kind": "Status", "code": 200 if found else 404})

    def _list(self, path: str, query: str) -> dict[str, Any]:
        items = [each for at, each in self.server.objects.items() if at.startswith(f"{path}/")]
        if "completion-index%3D0" in query:
            items = items[:1]
        kind = "PodList" if path.endswith("pods") else "EventList"
        return {"kind": kind, "apiVersion": "v1", "metadata": {}, "items": items}

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
