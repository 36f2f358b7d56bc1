"""make_hosts: several hosts on one machine, to cut and to crash, from an ordinary test.

with make_hosts(2) as hosts:
    a, b = hosts
    server = a.popen([sys.executable, "server.py", a.address])
    b.run([sys.executable, "client.py", a.address])
    hosts.cut(a, b)
    a.crash()

A host is a network namespace with its own address, host name and /etc/hosts; the file system is
shared, as a cluster's would be. The hosts hang on a switch in a namespace of its own: nothing is
added to the machine's own network, so any number of tests can use the same addresses and ports at
once, and a firewall of the machine does not see the packets.
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

# Each tool, and the Debian package that has it.
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
# An address no interface has: what is sent there is lost without anybody being told.
_NOBODY = "02:00:00:00:00:00"
_PATIENCE_S = 10.0

_PROBE = '"$0" link add br0 type bridge && "$0" link add a0 type veth peer name b0'
# A private mount namespace (unshare's default), so the bind mount is this command's alone.
_ENTER = 'set -e; "$0" "$1"; "$2" --no-mtab --bind "$3" /etc/hosts; shift 3; exec "$@"'


class CommandFailed(subprocess.CalledProcessError):
    """A command ended badly; the message has what it said."""

    def __str__(self) -> str:
        said = "\n".join(text.strip() for text in (self.stdout, self.stderr) if text)
        return f"{super().__str__()}\n{said}"


@dataclass(frozen=True)
class Host:
    """One host; commands on it are processes of this one, with only the network apart."""

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
        """Start `command` on this host; the process is the command's own, streams are text."""
        # Not `ip netns exec`: that remounts /sys, and the cgroups under it are gone.
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
        """Run `command` on this host to its end; CommandFailed, with its output, if it fails."""
        pipe = subprocess.PIPE
        with self.popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return _checked(subprocess.CompletedProcess(command, process.returncode, stdout, stderr))

    def crash(self) -> None:
        """Kill every process on this host at once; the host itself can be used again.

        The kernel lives on and closes their connections, so peers hear of it. For a host that
        falls silent, as without power, cut it off first.
        """
        # A process just started may not have reached its namespace yet; it is killed all the same.
        for process in self._processes:
            process.kill()
        _kill_all_in(self.namespace)
        while self._processes:
            self._processes.pop().wait(_PATIENCE_S)


class Hosts(tuple[Host, ...]):
    """The hosts of one network, in order of their names."""

    __slots__ = ()

    def cut(self, a: Host, b: Host) -> None:
        """Lose every packet between `a` and `b`, both ways; their connections stay half-open.

        Each takes the other to be at a hardware address nobody has. A blackhole route would be as
        silent to the connections there are, but lets a new one fail at once, as no cut cable does.
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
    """None when hosts can be made here, else the reason why not."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    missing = [tool for tool in _TOOLS if _found(tool) is None]
    if missing:
        packages = sorted({_TOOLS[tool] for tool in missing})
        return f"no {', '.join(missing)}; apt-get install -y {' '.join(packages)}"
    unshare = [_tool("unshare"), "--net", "--uts", "--mount", "/bin/sh", "-c"]
    probe = _completed([*unshare, _PROBE, _tool("ip")])
    return f"no namespaces or no bridge here: {probe.stderr.strip()}" if probe.returncode else None


@contextmanager
def make_hosts(num_hosts: int, rate_mbit: float | None = None) -> Iterator[Hosts]:
    """Hosts h1, h2, … that reach each other by name, each sending at most `rate_mbit` if given.

    On leaving, however that comes about, their processes are killed and everything is removed; if
    this process is itself killed, the next to make hosts does it.
    """
    if not 1 <= num_hosts <= 254:
        raise ValueError(f"num_hosts = {num_hosts}: must be from 1 to 254, they share one subnet")
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
    # Libraries resolve the host's own name to find the address that peers are to connect to.
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    hosts_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return hosts


def _make_namespace(name: str, stack: ExitStack) -> str:
    # Before it is there: an interrupt in between would leave it behind.
    stack.callback(_remove_namespace, name)
    _ip(f"netns add {name}")
    return name


def _remove_namespace(name: str) -> None:
    # Interfaces go with the namespace they are in, and so does a pair's other end.
    if (_NAMESPACES / name).exists():
        _ip(f"netns delete {name}")


def _remove_abandoned() -> None:
    """Hosts whose maker was killed before it could remove them, with what still runs on them."""
    for name in (path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*-*")):
        maker = name.split("-")[1]
        if maker.isdigit() and not Path(f"/proc/{maker}").exists():
            _kill_all_in(name)
            with suppress(CommandFailed):  # another process may be tidying up too
                _remove_namespace(name)


def _connect(host: Host, switch: str) -> None:
    inside = f"-n {host.namespace}"
    # Both ends are born where they belong: never, even for a moment, on the machine's own network.
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
    # Again until none is left: a process may have started another between the look and the blow.
    while pids := _pids_in(namespace):
        if time.monotonic() > deadline_s:
            raise DrivetrainError(f"processes {pids} of {namespace} outlive SIGKILL")
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
    """What tells one namespace from another; None for one that is gone, or a dead process's."""
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
    """Its full path, for a command's own `env` may have another PATH."""
    return _found(name) or name


def _found(name: str) -> str | None:
    # Where `ip` and `tc` are is not always on the PATH.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")
