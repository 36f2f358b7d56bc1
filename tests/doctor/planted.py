"""Faults planted on real hosts: each is a way to break one of them, and what must be said of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.finding import EnvironmentFinding, together
from drivetrain.doctor.channels import AGENT, Channel, Pipe
from drivetrain.doctor.checks import judge
from drivetrain.doctor.examine import HostQuestion, examine
from drivetrain.doctor.facts import Expected, Timeouts
from drivetrain.doctor.question import read_train_flags, timeouts_of
from drivetrain.testing.hosts import Host, Hosts, make_hosts

PORT = 29400
NUM_HOSTS = 3
MBIT = 1000.0

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "h[1-3]",
}


@dataclass
class Site:
    """Three hosts before they are examined; a fault changes what it needs to."""

    hosts: Hosts
    folder: Path
    question: HostQuestion
    shell: dict[str, str] = field(default_factory=dict)
    """Host → commands its agent runs first, in a mount namespace of its own."""
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    wrap: dict[str, list[str]] = field(default_factory=dict)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def channel(self, host: Host) -> Channel:
        first = f'{self.shell.get(host.name, ":")} && exec "$@"'
        command = ["sh", "-c", first, "sh", *self.wrap.get(host.name, []), *AGENT]
        env = {**clean_environment(), **self.env.get(host.name, {})}
        pipe = subprocess.PIPE
        return Pipe(host.name, host.popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe))


@dataclass(frozen=True)
class Fault:
    """`plant` breaks the site; the finding must come from `check`, name `host` and say `fix`."""

    name: str
    plant: Callable[[Site], None]
    check: str
    host: str
    fix: str


def clean_environment() -> dict[str, str]:
    """Without what the machine's own shell may have set."""
    kept = ("PATH", "PYTHONPATH", "HOME", "LANG", "VIRTUAL_ENV")
    return {name: os.environ[name] for name in kept if name in os.environ}


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    with make_hosts(NUM_HOSTS, rate_mbit=MBIT) as hosts:
        run_dir = folder / "run"
        run_dir.mkdir()
        expected = Expected(bytes_per_s=MBIT * 1e6 / 8, devices_per_node=None)
        question = HostQuestion(ports=(PORT,), run_dir=str(run_dir), expected=expected)
        yield Site(hosts, folder, question)


def findings_at(place: Site) -> list[EnvironmentFinding]:
    with ExitStack() as stack:
        channels = [place.channel(host) for host in place.hosts]
        for channel in channels:
            stack.callback(channel.close)
        examination, lost = examine(channels, place.question)
    return together([*lost, *judge(examination)])


def _ask(place: Site, **changes: object) -> None:
    import dataclasses

    place.question = dataclasses.replace(place.question, **changes)  # type: ignore[arg-type]


def blocked_port(place: Site) -> None:
    rule = ["-I", "INPUT", "-p", "tcp", "--dport", str(PORT), "-j", "DROP"]
    place.host("h2").run(["iptables", *rule])


def all_ports_blocked(place: Site) -> None:
    rule = ["-I", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-j", "DROP"]
    place.host("h2").run(["iptables", *rule])


def loopback_name(place: Site) -> None:
    _hosts_file(place, "h2", "127.0.1.1")


def _hosts_file(place: Site, name: str, address: str) -> None:
    lines = ["127.0.0.1 localhost"]
    for host in place.hosts:
        lines.append(f"{address if host.name == name else host.address} {host.name}")
    path = place.folder / f"hosts-of-{name}"
    path.write_text("\n".join(lines) + "\n")
    place.shell[name] = f"mount --bind {path} /etc/hosts"


def wrong_interface(place: Site) -> None:
    for command in (
        "ip link add docker0 type veth peer name docker1",
        "ip address add 172.30.0.1/24 dev docker0",
        "ip link set docker0 up",
        "ip link set docker1 up",
    ):
        place.host("h2").run(command.split())
    _hosts_file(place, "h2", "172.30.0.1")


def slow_link(place: Site) -> None:
    shape = "tc qdisc replace dev eth0 root tbf rate 100mbit burst 256kb latency 50ms"
    place.host("h2").run(shape.split())


def clock_skew(place: Site) -> None:
    place.wrap["h2"] = ["faketime", "-f", "+90s"]


def tiny_shared_memory(place: Site) -> None:
    place.shell["h2"] = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


def read_only(place: Site) -> None:
    run_dir = place.question.run_dir
    place.shell["h2"] = f"mount --bind {run_dir} {run_dir} && mount -o remount,ro,bind {run_dir}"


def full_disk(place: Site) -> None:
    disk = place.folder / "disk"
    disk.mkdir()
    # on the first host, and as its own disk: what is shared would be full for all
    place.shell["h2"] = (
        f"mount -t tmpfs -o size=16m tmpfs {disk} && head -c 15m /dev/zero > {disk}/old"
    )
    place.shell["h1"] = place.shell["h3"] = f"mount -t tmpfs -o size=8g tmpfs {disk}"
    _ask(place, run_dir=None, store=f"file://{disk}")


def few_open_files(place: Site) -> None:
    place.shell["h2"] = "ulimit -n 256"


def other_torch(place: Site) -> None:
    info = place.folder / "older" / "torch-2.9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    path = os.environ.get("PYTHONPATH", "")
    place.env["h2"] = {"PYTHONPATH": f"{info.parent}:{path}"}


STALE = f"import socket, time; server = socket.create_server(('', {PORT})); print(1, flush=True); "


def stale_process(place: Site) -> None:
    command = [sys.executable, "-c", STALE + "time.sleep(300)", "train.py"]
    process = place.host("h2").popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    process.stdout.close()


def contradictory_timeouts(place: Site) -> None:
    words = read_train_flags(["--stall-timeout", "900", "train.py", "parallel.timeout_s=600"])
    _ask(place, timeouts=timeouts_of(words))


def missing_variable(place: Site) -> None:
    for rank, host in enumerate(place.hosts):
        place.env[host.name] = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
    del place.env["h2"]["SLURM_PROCID"]
    _ask(place, target="slurm")


def unreachable_store(place: Site) -> None:
    # the store is on h1's side; h2 is told an address where nobody is
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for host in place.hosts:
        place.env[host.name] = {**keys, "AWS_ENDPOINT_URL": "http://10.77.0.9:9000"}
    _ask(place, store="s3://runs/gpt")


SMI = """#!/bin/sh
for gpu in $(seq {count}); do echo "NVIDIA H100 80GB HBM3, 81559, 570.86.15"; done
"""


def unequal_devices(place: Site) -> None:
    """No GPU is here: nvidia-smi is a stand-in that lists eight, and on h2 seven."""
    older = place.folder / "cuda" / "torch"
    older.mkdir(parents=True)
    version = subprocess.check_output(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        text=True,
    ).strip()
    # a torch with CUDA, as far as its version file says
    (older / "__init__.py").write_text("")
    (older / "version.py").write_text(f"__version__ = '{version}'\ncuda: str = '12.8'\n")
    for host in place.hosts:
        tools = place.folder / f"tools-{host.name}"
        tools.mkdir()
        (tools / "nvidia-smi").write_text(SMI.format(count=7 if host.name == "h2" else 8))
        (tools / "nvidia-smi").chmod(0o755)
        place.env[host.name] = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": f"{older.parent}:{os.environ.get('PYTHONPATH', '')}",
        }


FAULTS: Sequence[Fault] = (
    Fault("blocked port", blocked_port, "links", "h2", f"allow TCP port {PORT} to h2"),
    Fault("loopback hostname", loopback_name, "names", "h2", "GLOO_SOCKET_IFNAME=eth0"),
    Fault("wrong interface", wrong_interface, "interface", "h2", "GLOO_SOCKET_IFNAME=eth0"),
    Fault("10 × slower link", slow_link, "bandwidth", "h2", "ethtool"),
    Fault("clock skew", clock_skew, "clock", "h2", "chronyc makestep"),
    Fault("tiny /dev/shm", tiny_shared_memory, "shared memory", "h2", "--shm-size"),
    Fault("read-only run directory", read_only, "storage", "h2", "mount it writable"),
    Fault("full disk", full_disk, "storage", "h2", "delete old runs"),
    Fault("low ulimit", few_open_files, "limits", "h2", "ulimit -n 65536"),
    Fault("mismatched torch", other_torch, "versions", "h2", "pip install 'torch=="),
    Fault("stale process on a port", stale_process, "ports", "h2", "kill "),
    Fault("contradictory time-outs", contradictory_timeouts, "time-outs", "", "--stall-timeout"),
    Fault("missing scheduler variable", missing_variable, "scheduler", "h2", "srun"),
    Fault("unreachable store", unreachable_store, "storage", "h2", "AWS_ENDPOINT_URL"),
    Fault("unequal device counts", unequal_devices, "devices", "h2", "nvidia-smi"),
)
FURTHER: Sequence[Fault] = (
    Fault("every port blocked", all_ports_blocked, "links", "h2", "1024–65535"),
)


def missing_tools(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Programs the faults are planted with."""
    import shutil

    tools = ("iptables", "faketime", "tc", "ip")
    path = f"{environment.get('PATH', '')}:/usr/sbin:/sbin"
    return [tool for tool in tools if shutil.which(tool, path=path) is None]


__all__ = ["FAULTS", "FURTHER", "Fault", "Site", "Timeouts", "findings_at", "missing_tools", "site"]
