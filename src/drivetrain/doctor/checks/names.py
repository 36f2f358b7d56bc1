"""Names and interfaces: where will a rank tell the others to connect to?"""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.doctor.facts import Examination, HostFacts, Interface
from drivetrain.doctor.network import collective_address, is_loopback, nccl_interface


def check(examination: Examination) -> Iterator[Finding]:
    """Of no consequence on a single host: everybody there is reached by loopback."""
    if len(examination.hosts) < 2:
        return
    for host in examination.hosts:
        yield from _interface_named(host)
        yield from _own_name(host)
    yield from _peers(examination)


def _interface_named(host: HostFacts) -> Iterator[Finding]:
    wanted = host.variables.get("GLOO_SOCKET_IFNAME")
    if wanted and collective_address(host.variables, (), host.interfaces) is None:
        yield _no_such_interface(host, "GLOO_SOCKET_IFNAME", wanted)
    wanted = host.variables.get("NCCL_SOCKET_IFNAME")
    if wanted and nccl_interface(host.variables, host.interfaces) is None:
        yield _no_such_interface(host, "NCCL_SOCKET_IFNAME", wanted)


def _no_such_interface(host: HostFacts, variable: str, wanted: str) -> Finding:
    names = ", ".join(f"{each.name} ({each.address})" for each in host.interfaces)
    return Finding(
        "interface",
        "error",
        (host.name,),
        f"{variable} names an interface that is not there",
        f"{variable}={wanted}; there are {names or 'none'}",
        f"export {variable}={suggested(host) or 'INTERFACE'}",
    )


def _own_name(host: HostFacts) -> Iterator[Finding]:
    if host.variables.get("GLOO_SOCKET_IFNAME"):
        return
    interface = suggested(host)
    address = next((i.address for i in host.interfaces if i.name == interface), "ITS ADDRESS")
    if not host.own_addresses:
        yield Finding(
            "names",
            "error",
            (host.name,),
            "its own name has no address: ranks could not say where they are",
            f"`getent hosts {host.name}` finds nothing",
            f"add '{address} {host.name}' to /etc/hosts there,"
            f" or export GLOO_SOCKET_IFNAME={interface}",
        )
        return
    told = collective_address(host.variables, host.own_addresses, host.interfaces)
    if told is not None and is_loopback(told):
        yield Finding(
            "names",
            "error",
            (host.name,),
            "its own name points to loopback: its ranks would send the others to themselves",
            f"{host.name} → {told} on {host.name}",
            f"in /etc/hosts there, replace it by '{address} {host.name}',"
            f" or export GLOO_SOCKET_IFNAME={interface}",
        )


def suggested(host: HostFacts) -> str | None:
    """The interface to recommend: up, not loopback, not a container bridge."""

    def order(each: Interface) -> tuple[bool, bool]:
        is_bridge = each.name.startswith(("docker", "br-", "virbr", "cni", "veth"))
        return is_bridge, not each.is_up

    usable = [each for each in host.interfaces if not each.is_loopback]
    return min(usable, key=order).name if usable else None


def _peers(examination: Examination) -> Iterator[Finding]:
    """Names of other hosts that mean this one."""
    for link in examination.links:
        wrong = [address for address in link.resolved if is_loopback(address)]
        if wrong:
            yield Finding(
                "names",
                "error",
                (link.source,),
                f"the name of {link.target} points to loopback here",
                f"{link.target} → {wrong[0]} on {link.source}",
                f"put {link.target}'s own address into /etc/hosts or DNS of {link.source}",
            )
