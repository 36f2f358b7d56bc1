"""This host's interfaces, names and ports.

Interfaces are read from the kernel, not from /sys, which in a container may show the network of
another namespace (the one it was mounted in).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain.core.redaction import clean_text
from drivetrain.doctor.facts import Interface, PortUse

_GET_FLAGS, _GET_ADDRESS, _GET_MTU = 0x8913, 0x8915, 0x8921
_UP, _LOOPBACK = 0x1, 0x8


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that have an IPv4 address, in the kernel's order."""
    if sys.platform != "linux":
        return ()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        found = [_interface(asking.fileno(), name) for _, name in socket.if_nameindex()]
    return tuple(interface for interface in found if interface is not None)


def _interface(descriptor: int, name: str) -> Interface | None:
    import fcntl

    def ask(what: int) -> bytes:
        return fcntl.ioctl(descriptor, what, struct.pack("256s", name.encode()[:15]))

    try:
        flags = struct.unpack_from("H", ask(_GET_FLAGS), 16)[0]
        address = socket.inet_ntoa(ask(_GET_ADDRESS)[20:24])
        mtu = struct.unpack_from("i", ask(_GET_MTU), 16)[0]
    except OSError:  # no IPv4 address
        return None
    return Interface(name, address, mtu, bool(flags & _UP), bool(flags & _LOOPBACK))


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses that a name resolves to on this host; empty if there are none."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_loopback(address: str) -> bool:
    """True also for 127.0.1.1, which Debian's installer writes."""
    return address.startswith("127.") or address == "::1"


def collective_address(
    variables: Mapping[str, str], own_addresses: Sequence[str], found: Sequence[Interface]
) -> str | None:
    """Return the address gloo advertises: that of GLOO_SOCKET_IFNAME, or of the host's own name.

    None if the interface does not exist or the name has no address.
    """
    wanted = variables.get("GLOO_SOCKET_IFNAME")
    if wanted:
        names = wanted.split(",")
        return next((each.address for each in found if each.name == names[0]), None)
    version_4 = [address for address in own_addresses if ":" not in address]
    return next(iter(version_4 or own_addresses), None)


def nccl_interface(variables: Mapping[str, str], found: Sequence[Interface]) -> str | None:
    """Return the interface that NCCL's bootstrap uses: ib* first, docker* and lo last."""
    usable = [each for each in found if each.is_up]
    wanted = variables.get("NCCL_SOCKET_IFNAME", "")
    if wanted:
        return next((each.name for each in usable if _is_meant(each.name, wanted)), None)

    def order(each: Interface) -> int:
        if each.name.startswith("ib"):
            return 0
        return 3 if each.is_loopback else 2 if each.name.startswith("docker") else 1

    return min(usable, key=order).name if usable else None


def _is_meant(name: str, wanted: str) -> bool:
    """Apply NCCL's rules: prefixes, `=` for whole names, `^` to exclude."""
    is_exclusion = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    patterns = wanted.lstrip("^=").split(",")
    is_listed = any(name == p if exact else name.startswith(p) for p in patterns)
    return is_listed != is_exclusion


_LISTENING = "0A"


def port_use(port: int) -> PortUse:
    """Return whether a server could open the port here, or else which process holds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
        # as servers do: connections in TIME_WAIT do not block the port
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind(("", port))
            trying.listen(1)
        except OSError:
            return _holder(port)
    return PortUse(port, is_free=True)


def _holder(port: int) -> PortUse:
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for folder in Path("/proc").glob("[0-9]*"):
        if sockets and _holds(folder, sockets):
            return PortUse(port, False, int(folder.name), *_described(folder))
    return PortUse(port, is_free=False)


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes


def _holds(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in sockets for entry in (folder / "fd").iterdir())
    except OSError:  # another user's process, or one that just exited
        return False


def _described(folder: Path) -> tuple[str, float | None, bool]:
    """Return a process's command line, its age, and whether its parent is gone."""
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except OSError:
        return "", None, False
    age_s = max(0.0, uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return clean_text(words.strip())[:120], age_s, fields[1] == "1"


def age_text(age_s: float | None) -> str:
    """Return when a process was started, as text for evidence."""
    if age_s is None:
        return "unknown age"
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
    return f"running since {started}"
