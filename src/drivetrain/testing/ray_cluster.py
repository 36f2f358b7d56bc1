"""make_ray_cluster: a real Ray cluster on test hosts, each with its own address.

with make_hosts(2) as hosts, make_ray_cluster(hosts, tmp_path) as cluster:
    hosts[0].run([sys.executable, "driver.py"], env=cluster.environment)
    hosts[1].crash()
    cluster.join(hosts[1])

The first host is the head. Ray's processes end with their hosts; none is stopped by name, so other
clusters on the machine are not affected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import DrivetrainError
from drivetrain.testing.hosts import Host, Hosts

_START_S = 600.0
# Ray gives a node half a minute to start, too little on a busy machine; it cannot be configured.
_TRIES = 5
_STARTED = "Ray runtime started"
_OBJECT_STORE_BYTES = 80_000_000
_SETTINGS = {
    # notice a crashed host in seconds; the default takes half a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # starting a cluster takes long on a busy machine
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "500",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "90",
}


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster on test hosts; `folder` holds its sessions and logs."""

    head: Host
    folder: Path
    cpus_per_host: int
    has_job_server: bool
    environment: Mapping[str, str]
    """Environment for Ray's own processes and for drivers; it names the cluster."""

    @property
    def address(self) -> str:
        """Address for ray.init()."""
        return f"{self.head.address}:6379"

    @property
    def job_server(self) -> str:
        """Address for Ray's Jobs API."""
        return f"http://{self.head.address}:8265"

    @property
    def client_server(self) -> str:
        """Address for Ray's client; the Jobs API asks it for the job server."""
        return f"ray://{self.head.address}:10001"

    def join(self, host: Host) -> None:
        """Start Ray on a host and wait until it reports that it has started."""
        for _ in range(_TRIES):
            if self._starts(host):
                return
            host.crash()
        said = (self.folder / f"{host.name}.log").read_text()
        raise DrivetrainError(f"Ray did not start on {host.name} in {_TRIES} attempts:\n{said}")

    def _starts(self, host: Host) -> bool:
        log = self.folder / f"{host.name}.log"
        with log.open("w") as file:
            process = host.popen(
                self._command(host), env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )
        deadline_s = time.monotonic() + _START_S
        while _STARTED not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)
        return True

    def _command(self, host: Host) -> list[str]:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        if host is self.head:
            ray += ["--head", "--port=6379", f"--temp-dir={self.folder}"]
            ray += [f"--include-dashboard={self.has_job_server}", "--dashboard-host=0.0.0.0"]
        else:
            ray += [f"--address={self.address}"]
        ray += [f"--num-cpus={self.cpus_per_host}", f"--node-ip-address={host.address}"]
        return [*ray, f"--object-store-memory={_OBJECT_STORE_BYTES}"]


def cluster_environment(head: str, folder: Path, *, token: str | None = None) -> dict[str, str]:
    """Return an environment without the user's Ray settings.

    A token in the home directory would make every new head require it.
    """
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("RAY_AUTH_")}
    guard = {"RAY_AUTH_MODE": "disabled"}
    if token is not None:
        guard = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    address = {"RAY_ADDRESS": f"{head}:6379", "HOME": str(home)}
    return {**inherited, **_SETTINGS, **address, **guard}


@contextmanager
def make_ray_cluster(
    hosts: Hosts,
    folder: Path,
    *,
    cpus_per_host: int = 1,
    has_job_server: bool = False,
    token: str | None = None,
) -> Iterator[RayCluster]:
    """Start Ray on every host, ready for drivers; it ends with the hosts.

    Args:
        hosts: The hosts of the cluster; the first is the head.
        folder: Directory for Ray's sessions. Use a short path: it contains sockets.
        cpus_per_host: Number of CPUs that Ray assumes each host has.
        has_job_server: Start the Jobs API; its dashboard is most of a cluster's load.
        token: Authentication token that clients must present; None: no authentication.
    """
    variables = cluster_environment(hosts[0].address, folder, token=token)
    cluster = RayCluster(hosts[0], folder, cpus_per_host, has_job_server, variables)
    try:
        for host in hosts:
            cluster.join(host)
        yield cluster
    finally:
        for host in hosts:
            host.crash()
