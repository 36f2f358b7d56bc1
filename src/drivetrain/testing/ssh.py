"""start_sshd: real OpenSSH between test hosts on one machine, with keys made for the test.

with make_hosts(3) as (desk, *machines), start_sshd(machines) as ssh:
    desk.run([*ssh.split(), machines[0].name, "hostname"])
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from drivetrain.core.errors import DrivetrainError
from drivetrain.testing.hosts import Host

_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
_START_S = 15.0
_PORT = 22
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
PermitRootLogin yes
UsePAM no
"""
_CLIENT = """\
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
    LogLevel ERROR
    BatchMode yes
"""


def ssh_available() -> str | None:
    """Return None if sshd can be started here, else the reason why not."""
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if _tool(tool) is None]
    if missing:
        return f"no {', '.join(missing)}; apt-get install -y openssh-server openssh-client"
    return None


@contextmanager
def start_sshd(hosts: Sequence[Host]) -> Iterator[str]:
    """Start an sshd on each host; yield the ssh command that reaches them, as a shell string."""
    with tempfile.TemporaryDirectory(prefix="dt-ssh-") as name:
        folder = Path(name)
        for key in ("host_key", "user_key"):
            keygen = [_tool("ssh-keygen") or "", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*keygen, str(folder / key)], check=True)
        (folder / "sshd_config").write_text(_SERVER.format(folder=folder))
        (folder / "config").write_text(_CLIENT.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
        for host in hosts:
            boot_sshd(host, folder)
        yield f"ssh -T -F {folder}/config"


def boot_sshd(host: Host, folder: Path) -> None:
    """Start sshd, also after a crash of the host, and wait until it listens."""
    with (folder / f"{host.name}.log").open("a") as log:
        command = [_tool("sshd") or "", "-D", "-e", "-f", str(folder / "sshd_config")]
        process = host.popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline_s = time.monotonic() + _START_S
    while not _listens(host):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise DrivetrainError(f"sshd: {(folder / f'{host.name}.log').read_text()}")
        time.sleep(0.05)


def _listens(host: Host) -> bool:
    """True if the port is open, checked on the host: this process is on another network."""
    table = host.run(["cat", "/proc/self/net/tcp"]).stdout
    ports = [line.split()[1].rpartition(":")[2] for line in table.splitlines()[1:]]
    return f"{_PORT:04X}" in ports


def _tool(name: str) -> str | None:
    return shutil.which(name, path=_SEARCH)
