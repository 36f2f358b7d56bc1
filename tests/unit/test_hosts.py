"""Hosts made of network namespaces: real packets, real cuts, nothing left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.testing.hosts import CommandFailed, Host, Hosts, hosts_available, make_hosts

pytestmark = pytest.mark.skipif(bool(hosts_available()), reason=hosts_available() or "")

# The network is the test's own, so a fixed port is free.
PORT = 29500

ECHO = f"""
import socket
connection, _ = socket.create_server(("", {PORT})).accept()
while data := connection.recv(100):
    connection.sendall(data)
"""

# Answers each line on its input with what the echo at the named host gave back.
CLIENT = f"""
import socket, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], {PORT}))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
print(connection.getsockname()[0], connection.getpeername()[0], flush=True)
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(100).decode(), end="", flush=True)
"""

# Says, when asked, whether a datagram came; it has been sent by then and travels microseconds.
LISTEN = f"""
import socket
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.bind(("", {PORT}))
print("ready", flush=True)
input()
listener.settimeout(0.5)
try:
    print(listener.recv(100).decode())
except TimeoutError:
    print("nothing")
"""

SEND = f"""
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"datagram", (sys.argv[1], {PORT}))
"""

CONNECT = f"""
import socket, sys
socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2]))
"""

ALL_REDUCE = f"""
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

rank, address = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
timeout = timedelta(seconds=60)
store = dist.TCPStore(address, {PORT}, is_master=rank == 0, timeout=timeout)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
tensor = torch.full((1000,), rank + 1.0)
dist.all_reduce(tensor)
print(tensor.unique().tolist())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with make_hosts(2) as made:
        yield made


@contextmanager
def start(host: Host, script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with host.popen([sys.executable, "-c", script, *args], stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            # Popen waits, and some of these never end by themselves.
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def is_silent(process: subprocess.Popen[str], for_s: float) -> bool:
    assert process.stdout is not None
    return not select.select([process.stdout], [], [], for_s)[0]


def datagram(sender: Host, receiver: Host) -> str:
    with start(receiver, LISTEN) as listener:
        assert said(listener) == "ready"
        sender.run([sys.executable, "-c", SEND, receiver.address])
        say(listener, "well?")
        return said(listener)


def is_alive(pid: str) -> bool:
    """A zombie is not: it waits for its parent to take notice."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def traces() -> set[str]:
    """Whatever making hosts could leave on the machine."""
    ip = ["netns", "list"], ["-o", "-br", "address"], ["route", "show", "table", "all"]
    lines = {line for args in ip for line in subprocess.check_output(["ip", *args]).splitlines()}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    # Directories for the names: those of this process, others make their own meanwhile.
    mine = {path.name for path in Path(tempfile.gettempdir()).glob(f"dt-{os.getpid()}-*")}
    found = {line.decode() for line in lines} | set(mounts) | mine
    return {line for line in found if f"dt-{os.getpid()}-" in line or "10.77." in line}


def test_hosts_have_names_and_reach_each_other_by_them(hosts: Hosts) -> None:
    a, b = hosts
    assert [host.run(["hostname"]).stdout for host in hosts] == ["h1\n", "h2\n"]
    with start(a, ECHO), start(b, CLIENT, "h1") as client:
        assert said(client) == f"{b.address} {a.address}"
        say(client, "hello")
        assert said(client) == "hello"


def test_a_command_is_its_own_process_and_shares_the_files(hosts: Hosts, tmp_path: Path) -> None:
    a, b = hosts
    write = "import os; open('pid', 'w').write(f'{os.getpid()} {os.environ[\"WHO\"]}')"
    process = a.popen([sys.executable, "-c", write], env={"WHO": "me"}, cwd=tmp_path)
    assert process.wait() == 0
    assert b.run(["cat", tmp_path / "pid"]).stdout == f"{process.pid} me"


def test_a_failing_command_says_why(hosts: Hosts) -> None:
    with pytest.raises(CommandFailed, match="No such file") as failure:
        hosts[0].run(["cat", "/nowhere"])
    assert failure.value.returncode == 1


def test_a_cut_stalls_a_connection_and_healing_resumes_it(hosts: Hosts) -> None:
    a, b = hosts
    with start(a, ECHO), start(b, CLIENT, a.address) as client:
        said(client)
        hosts.cut(a, b)
        say(client, "through the cut")
        assert is_silent(client, for_s=1)
        assert client.poll() is None
        # A new connection hears nothing either: no refusal, no error.
        with pytest.raises(CommandFailed, match="TimeoutError"):
            b.run([sys.executable, "-c", CONNECT, a.address, "0.5"])
        hosts.heal(a, b)
        assert said(client) == "through the cut"


def test_a_cut_is_both_ways(hosts: Hosts) -> None:
    a, b = hosts
    hosts.cut(a, b)
    assert (datagram(a, b), datagram(b, a)) == ("nothing", "nothing")
    for _ in range(2):  # healing what is whole does no harm
        hosts.heal(b, a)
    assert (datagram(a, b), datagram(b, a)) == ("datagram", "datagram")


def test_a_cut_leaves_the_other_hosts_alone() -> None:
    with make_hosts(3, rate_mbit=100) as hosts:
        a, b, c = hosts
        hosts.cut(a, b)
        with start(a, ECHO), start(c, CLIENT, a.address) as client:
            assert said(client) == f"{c.address} {a.address}"
        assert "rate 100Mbit" in a.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_a_crash_kills_that_host_only_and_all_of_it(hosts: Hosts) -> None:
    a, b = hosts
    # The orphan has left its parent, its session and its group: only the namespace has it still.
    orphan = a.run(["sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!"]).stdout.strip()
    victim, bystander = a.popen(["sleep", "300"]), b.popen(["sleep", "300"])
    assert is_alive(orphan)
    a.crash()
    assert victim.returncode == -signal.SIGKILL
    assert not is_alive(orphan)
    assert bystander.poll() is None
    assert a.run(["hostname"]).stdout == "h1\n"


def test_nothing_is_left_even_after_a_failure() -> None:
    before = traces()
    with pytest.raises(ZeroDivisionError), make_hosts(2) as hosts:
        process = hosts[0].popen(["sleep", "300"])
        assert len(traces() - before) >= 3
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert traces() == before


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    code = (
        "import time; from drivetrain.testing.hosts import make_hosts\n"
        "with make_hosts(1) as hosts:\n"
        "    left = hosts[0].popen(['sleep', '600'])\n"
        "    print(hosts[0].namespace, left.pid, flush=True)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        namespace, pid = maker.stdout.readline().split()
        maker.kill()
    assert Path("/run/netns", namespace).exists()
    with make_hosts(1):
        assert not Path("/run/netns", namespace).exists()
        assert not is_alive(pid)


def test_half_built_hosts_are_taken_down() -> None:
    before = traces()
    # No rate at all: the kernel refuses it, when the switch and the first host are up.
    with pytest.raises(CommandFailed, match="rate"), make_hosts(2, rate_mbit=0):
        pytest.fail("was made")
    assert traces() == before


def test_two_networks_at_once_do_not_meet(hosts: Hosts) -> None:
    with make_hosts(1) as others:
        alone, (a, b) = others[0], hosts
        assert alone.address == a.address
        # The same address and port on both; each is heard on its own network only.
        with start(alone, LISTEN) as listener:
            assert said(listener) == "ready"
            assert datagram(b, a) == "datagram"
            say(listener, "well?")
            assert said(listener) == "nothing"


def test_gloo_finds_its_peer_on_the_other_host(hosts: Hosts) -> None:
    pipe = subprocess.PIPE
    ranks = [
        host.popen(
            [sys.executable, "-c", ALL_REDUCE, str(rank), hosts[0].address],
            stdout=pipe,
            stderr=pipe,
        )
        for rank, host in enumerate(hosts)
    ]
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    assert [stdout.strip() for stdout, _ in outputs] == ["[3.0]", "[3.0]"], outputs
