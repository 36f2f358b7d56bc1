"""make_hosts: several hosts on one machine, to disconnect and to crash from an ordinary test.

with make_hosts(2) as hosts:
    a, b = hosts
    server = a.popen([sys.executable, "server.py", a.address])
    b.run([sys.executable, "client.py", a.address])
    hosts.cut(a, b)
    a.crash()

A host is a network namespace with its own address, host name and /etc/hosts. The file system is
shared, as on a cluster. The hosts are connected to a switch in a separate namespace: nothing is
added to the machine's own network, so any number of tests can use the same addresses and ports at
the same time, and the machine's firewall does not see the packets.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeAlias

from drivetrain.core.errors import DrivetrainError, EnvironmentProblem, Problem

Stream: TypeAlias = int | IO[Any] | None

# Each tool and the Debian package that contains it.
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_NAMESPACES = Path("/run/netns")
_PREFIX = "dt"
# A hardware address that no interface has: packets sent there are lost silently.
_NOBODY = "02:00:00:00:00:00"
_PATIENCE_S = 10.0

_PROBE = '"$0" link add br0 type bridge && "$0" link add a0 type veth peer name b0'
# A private mount namespace (unshare's default), so the bind mount is this command's alone.
_ENTER = 'set -e; "$0" "$1"; "$2" --no-mtab --bind "$3" /etc/hosts; shift 3; exec "$@"'


class CommandFailed(subprocess.CalledProcessError):
    """A command failed; the message includes its output."""

    def __str__(self) -> str:
        said = "\n".join(text.strip() for text in (self.stdout, self.stderr) if text)
        return f"{super().__str__()}\n{said}"


@dataclass(frozen=True)
class Host:
    """One host; its commands are child processes that differ only in their network."""

    name: str
    address: str
    namespace: str
    hosts_file: Path = field(repr=False)
    _processes: list[subprocess.Popen[str]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[str]:
        """Start `command` on this host and return its process; streams are text."""
        # Not `ip netns exec`: it remounts /sys, which hides the cgroups.
        enter = [_tool("nsenter"), f"--net={_NAMESPACES / self.namespace}"]
        enter += [_tool("unshare"), "--uts", "--mount", "/bin/sh", "-c", _ENTER]
        enter += [_tool("hostname"), self.name, _tool("mount"), str(self.hosts_file)]
        process = subprocess.Popen(
            [*enter, *map(str, command)],
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float | None = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on this host until it ends; CommandFailed, with its output, if it fails."""
        pipe = subprocess.PIPE
        with self.popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return _checked(subprocess.CompletedProcess(command, process.returncode, stdout, stderr))

    def crash(self) -> None:
        """Kill every process on this host at once; the host can be used again afterwards.

        The kernel keeps running and closes the connections, so peers notice. To simulate a power
        failure, after which a host is silent, cut it off first.
        """
        # A process just started may not have entered its namespace yet; it must be killed too.
        for process in self._processes:
            process.kill()
        _kill_all_in(self.namespace)
        while self._processes:
            self._processes.pop().wait(_PATIENCE_S)


class Hosts(tuple[Host, ...]):
    """The hosts of one network, in order of their names."""

    __slots__ = ()

    def cut(self, a: Host, b: Host) -> None:
        """Drop every packet between `a` and `b` in both directions; connections stay half-open.

        Each host maps the other to a hardware address that does not exist. A blackhole route would
        also silence existing connections, but new ones would fail at once, unlike with a cut cable.
        """
        for one, other in ((a, b), (b, a)):
            _ip(
                f"-n {one.namespace} neigh replace {other.address}"
                f" lladdr {_NOBODY} nud permanent dev eth0"
            )

    def heal(self, a: Host, b: Host) -> None:
        """Let packets between `a` and `b` through again."""
        for one, other in ((a, b), (b, a)):
            _ip(f"-n {one.namespace} neigh flush to {other.address} dev eth0 nud permanent")


def hosts_available() -> str | None:
    """Return None if hosts can be created here, else the reason why not."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can create"
    missing = [tool for tool in _TOOLS if _found(tool) is None]
    if missing:
        packages = sorted({_TOOLS[tool] for tool in missing})
        return f"no {', '.join(missing)}; apt-get install -y {' '.join(packages)}"
    unshare = [_tool("unshare"), "--net", "--uts", "--mount", "/bin/sh", "-c"]
    probe = _completed([*unshare, _PROBE, _tool("ip")])
    return (
        f"cannot create network namespaces or a bridge: {probe.stderr.strip()}"
        if probe.returncode
        else None
    )


@contextmanager
def make_hosts(num_hosts: int, rate_mbit: float | None = None) -> Iterator[Hosts]:
    """Create hosts h1, h2, … that reach each other by name; `rate_mbit` limits what each sends.

    On exit, their processes are killed and everything is removed, even after an error. If this
    process is itself killed, the next one that creates hosts cleans up.
    """
    if not 1 <= num_hosts <= 254:
        raise ValueError(
            f"num_hosts = {num_hosts}: must be from 1 to 254, because they share one subnet"
        )
    if reason := hosts_available():
        remedy = "skip the test where hosts_available() gives a reason"
        raise EnvironmentProblem([Problem("make_hosts", reason, remedy, has_value=False)])
    _remove_abandoned()
    prefix = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix=f"{prefix}-"))
        hosts = _named_hosts(num_hosts, prefix, Path(directory) / "hosts")
        switch = _make_namespace(f"{prefix}-switch", stack)
        _ip(f"-n {switch} link add br0 up type bridge")
        for host in hosts:
            _make_namespace(host.namespace, stack)
            stack.callback(host.crash)
            _connect(host, switch)
            if rate_mbit is not None:
                _limit(host, rate_mbit)
        yield hosts


def _named_hosts(num_hosts: int, prefix: str, hosts_file: Path) -> Hosts:
    hosts = Hosts(
        Host(f"h{number}", f"10.77.0.{number}", f"{prefix}-h{number}", hosts_file)
        for number in range(1, num_hosts + 1)
    )
    # Libraries resolve the host's own name to find the address that peers should connect to.
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    hosts_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return hosts


def _make_namespace(name: str, stack: ExitStack) -> str:
    # Registered before it exists: an interrupt in between would leave it behind.
    stack.callback(_remove_namespace, name)
    _ip(f"netns add {name}")
    return name


def _remove_namespace(name: str) -> None:
    # Interfaces are removed with their namespace, and so is the other end of a veth pair.
    if (_NAMESPACES / name).exists():
        _ip(f"netns delete {name}")


def _remove_abandoned() -> None:
    """Remove hosts, and their processes, whose creator was killed before it could."""
    for name in (path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*-*")):
        maker = name.split("-")[1]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists():
            _kill_all_in(name)
            with suppress(CommandFailed):  # another process may be removing it too
                _remove_namespace(name)


def _connect(host: Host, switch: str) -> None:
    inside = f"-n {host.namespace}"
    # Both ends are created inside their namespaces, never on the machine's own network.
    _ip(f"link add eth0 netns {host.namespace} type veth peer name {host.name} netns {switch}")
    _ip(f"-n {switch} link set {host.name} master br0 up")
    _ip(f"{inside} address add {host.address}/24 dev eth0")
    _ip(f"{inside} link set eth0 up")
    _ip(f"{inside} link set lo up")


def _limit(host: Host, rate_mbit: float) -> None:
    # The bucket holds a few large segments; a smaller one keeps high rates from being reached.
    shape = f"root tbf rate {rate_mbit:g}mbit burst 256kb latency 50ms"
    _run("tc", f"-n {host.namespace} qdisc replace dev eth0 {shape}")


def _kill_all_in(namespace: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    # Repeat until none is left: a process may start another between the listing and the kill.
    while pids := _pids_in(namespace):
        if time.monotonic() > deadline_s:
            raise DrivetrainError(f"processes {pids} of {namespace} survived SIGKILL")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_in(namespace: str) -> list[int]:
    network = _identity(_NAMESPACES / namespace)
    if network is None:
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) == network]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a namespace's identity; None if it, or its process, no longer exists."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _ip(arguments: str) -> None:
    _run("ip", arguments)


def _run(tool: str, arguments: str) -> None:
    _checked(_completed([_tool(tool), *arguments.split()]))


def _completed(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _checked(
    completed: subprocess.CompletedProcess[str],
) -> subprocess.CompletedProcess[str]:
    if completed.returncode:
        raise CommandFailed(
            completed.returncode, completed.args, completed.stdout, completed.stderr
        )
    return completed


def _tool(name: str) -> str:
    """Return the tool's full path: a command's own `env` may have another PATH."""
    return _found(name) or name


def _found(name: str) -> str | None:
    # The directory of `ip` and `tc` is not always on the PATH.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")
