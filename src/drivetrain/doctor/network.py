"""This host's interfaces and names.

The kernel is asked, not /sys: that shows the network of whoever mounted it, which in a container
need not be one's own.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping, Sequence

from drivetrain.doctor.facts import Interface

_GET_FLAGS, _GET_ADDRESS, _GET_MTU = 0x8913, 0x8915, 0x8921
_UP, _LOOPBACK = 0x1, 0x8


def interfaces() -> tuple[Interface, ...]:
    """Those that have an IPv4 address, in the kernel's order."""
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
    """The addresses of a name, as a program on this host gets them; empty when there are none."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def is_loopback(address: str) -> bool:
    """127.0.1.1 is, too: Debian's installer writes that one."""
    return address.startswith("127.") or address == "::1"


def collective_address(
    variables: Mapping[str, str], own_addresses: Sequence[str], found: Sequence[Interface]
) -> str | None:
    """The address gloo gives to the other ranks: of the interface it is told, or of its own name.

    None when that cannot be known, because the interface is not there or the name has no address.
    """
    wanted = variables.get("GLOO_SOCKET_IFNAME")
    if wanted:
        names = wanted.split(",")
        return next((each.address for each in found if each.name == names[0]), None)
    version_4 = [address for address in own_addresses if ":" not in address]
    return next(iter(version_4 or own_addresses), None)


def nccl_interface(variables: Mapping[str, str], found: Sequence[Interface]) -> str | None:
    """The interface NCCL's bootstrap takes: ib* first, docker* and lo last."""
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
    """NCCL's own rules: prefixes, `=` for whole names, `^` for all but these."""
    is_exclusion = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    patterns = wanted.lstrip("^=").split(",")
    is_listed = any(name == p if exact else name.startswith(p) for p in patterns)
    return is_listed != is_exclusion
