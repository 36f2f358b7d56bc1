"""The newest scalars at an endpoint that Prometheus scrapes, one per node.

`train/loss` is `drivetrain_train_loss`, labelled with the run and the host. Where the endpoint is
stands in `prometheus/<run>-<host>.json` beside the run's directory, in the format of Prometheus'
file_sd_configs, so that a server that reads this folder finds every node of every run by itself.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from typing import Any

from drivetrain.core.files import write_whole
from drivetrain.core.requirements import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars

_GPU = re.compile(r"/gpu_(\d+)_")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """An HTTP server in a thread of prometheus_client's own."""

    name = "prometheus"
    per_node = True
    every_s = 1.0

    def __init__(self, directory: RunDirectory) -> None:
        client: Any = require("prometheus_client", extra="prometheus")
        settings = (directory.config().get("record") or {}).get("prometheus") or {}
        self._client = client
        self._registry = client.CollectorRegistry()
        self._labels = {"run": directory.path.name, "host": socket.gethostname()}
        self._gauges: dict[str, Any] = {}
        host = str(settings.get("host", "127.0.0.1"))
        self._server, self._thread = self._listen(host, int(settings.get("port", 9464)))
        port = self._server.server_port
        name = f"{directory.path.name}-{self._labels['host']}.json"
        self._note = directory.path.parent / "prometheus" / name
        reached_at = host if host.startswith("127.") else self._labels["host"]
        target = {"targets": [f"{reached_at}:{port}"], "labels": self._labels}
        write_whole(self._note, json.dumps([target]) + "\n")

    def write(self, batch: Sequence[Scalars]) -> None:
        """Only the newest value of each counts."""
        for step, time_s, values in batch:
            self._set("train/step", step)
            self._set("last_report_timestamp_seconds", time_s)
            for name, value in values.items():
                self._set(name, value)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        """Answer no more; a target that is gone is how Prometheus sees the end of a run."""
        self._note.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _listen(self, host: str, port: int) -> tuple[Any, Any]:
        """At this port, or at any other when another run has it."""
        for candidate in (port, 0):
            try:
                server, thread = self._client.start_http_server(
                    candidate, host, registry=self._registry
                )
            except OSError:
                if candidate == 0:
                    raise
            else:
                return server, thread
        raise AssertionError("unreachable")

    def _set(self, name: str, value: float) -> None:
        metric, own = metric_name(name)
        labels = {**self._labels, **own}
        gauge = self._gauges.get(metric)
        if gauge is None:
            gauge = self._gauges[metric] = self._client.Gauge(
                metric, name, list(labels), registry=self._registry
            )
        gauge.labels(**labels).set(value)


def metric_name(name: str) -> tuple[str, dict[str, str]]:
    """train/loss → drivetrain_train_loss; which GPU it is about becomes a label."""
    gpu = _GPU.search(name)
    labels = {} if gpu is None else {"gpu": gpu[1]}
    return f"drivetrain_{_NOT_IN_A_NAME.sub('_', _GPU.sub('/gpu_', name))}", labels
