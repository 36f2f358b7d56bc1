"""Checks of the network: names and interfaces, ports, and links between hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from drivetrain.core.finding import EnvironmentFinding
from drivetrain.doctor.facts import (
    Dial,
    Examination,
    Expected,
    HostFacts,
    HostLink,
    Interface,
    PortUse,
)
from drivetrain.doctor.network import age_text, collective_address, is_loopback, nccl_interface

# Names and interfaces: which address will a rank advertise to the others?


def check_names(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Check names and interfaces; not needed on a single host, where loopback works."""
    if len(examination.hosts) < 2:
        return
    for host in examination.hosts:
        yield from _interface_named(host)
        yield from _own_name(host)
    yield from _peers(examination)


def _interface_named(host: HostFacts) -> Iterator[EnvironmentFinding]:
    wanted = host.variables.get("GLOO_SOCKET_IFNAME")
    if wanted and collective_address(host.variables, (), host.interfaces) is None:
        yield _no_such_interface(host, "GLOO_SOCKET_IFNAME", wanted)
    wanted = host.variables.get("NCCL_SOCKET_IFNAME")
    if wanted and nccl_interface(host.variables, host.interfaces) is None:
        yield _no_such_interface(host, "NCCL_SOCKET_IFNAME", wanted)


def _no_such_interface(host: HostFacts, variable: str, wanted: str) -> EnvironmentFinding:
    names = ", ".join(f"{each.name} ({each.address})" for each in host.interfaces)
    return EnvironmentFinding(
        "interface",
        "error",
        (host.name,),
        f"{variable} names an interface that does not exist",
        f"{variable}={wanted}; interfaces: {names or 'none'}",
        f"export {variable}={suggested(host) or 'INTERFACE'}",
    )


def _own_name(host: HostFacts) -> Iterator[EnvironmentFinding]:
    if host.variables.get("GLOO_SOCKET_IFNAME"):
        return
    interface = suggested(host)
    address = next((i.address for i in host.interfaces if i.name == interface), "ITS ADDRESS")
    if not host.own_addresses:
        yield EnvironmentFinding(
            "names",
            "error",
            (host.name,),
            "its own host name has no address: ranks could not advertise one",
            f"`getent hosts {host.name}` finds nothing",
            f"add '{address} {host.name}' to /etc/hosts there,"
            f" or export GLOO_SOCKET_IFNAME={interface}",
        )
        return
    told = collective_address(host.variables, host.own_addresses, host.interfaces)
    if told is not None and is_loopback(told):
        yield EnvironmentFinding(
            "names",
            "error",
            (host.name,),
            "its own host name resolves to loopback: other ranks would connect to themselves",
            f"{host.name} → {told} on {host.name}",
            f"in /etc/hosts there, replace it with '{address} {host.name}',"
            f" or export GLOO_SOCKET_IFNAME={interface}",
        )


def suggested(host: HostFacts) -> str | None:
    """The interface to recommend: up, not loopback, not a container bridge."""

    def order(each: Interface) -> tuple[bool, bool]:
        is_bridge = each.name.startswith(("docker", "br-", "virbr", "cni", "veth"))
        return is_bridge, not each.is_up

    usable = [each for each in host.interfaces if not each.is_loopback]
    return min(usable, key=order).name if usable else None


def _peers(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Find names of other hosts that resolve to loopback."""
    for link in examination.links:
        wrong = [address for address in link.resolved if is_loopback(address)]
        if wrong:
            yield EnvironmentFinding(
                "names",
                "error",
                (link.source,),
                f"the name of {link.target} resolves to loopback here",
                f"{link.target} → {wrong[0]} on {link.source}",
                f"put {link.target}'s own address into /etc/hosts or DNS of {link.source}",
            )


# Ports that the run needs and another process holds.


def check_ports(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Find ports in use, usually by leftovers of an earlier run."""
    for host in examination.hosts:
        for use in host.ports:
            if not use.is_free:
                yield EnvironmentFinding(
                    "ports",
                    "error",
                    (host.name,),
                    f"port {use.port} is in use by another process",
                    _holder(use),
                    _fix(host.name, use),
                )


def _holder(use: PortUse) -> str:
    if use.pid is None:
        return "this user cannot see which process uses it"
    orphan = ", its parent process is gone" if use.is_orphan else ""
    return f"pid {use.pid}, {age_text(use.age_s)}{orphan}: {use.command}"


def _fix(host: str, use: PortUse) -> str:
    if use.pid is None:
        return f"sudo ss -ltnp 'sport = :{use.port}' on {host}; end it, or use another port"
    return f"if it is left over from an earlier run: kill {use.pid} on {host}; or use another port"


# Between hosts: firewalls, wrong interfaces, slow links.

# Below these fractions of the expected or the median rate, a link is slow. One TCP stream does not
# saturate a fast link, so a link that carries enough for one stream is never called slow.
_SLOW_OF_EXPECTED, _SLOW_OF_MEDIAN = 0.5, 0.25
_ONE_STREAM_BYTES_PER_S = 1.0e9
_LATE_OF_EXPECTED, _LATE_OF_MEDIAN, _NOTICEABLE_S = 5.0, 10.0, 0.001
_FEWEST_TO_COMPARE = 4


def check_links(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Check reachability, blocked ports, rates and latencies; unreachable links have no rates."""
    hosts = {host.name: host for host in examination.hosts}
    yield from _unreachable(examination.links, hosts)
    yield from _blocked_ports(examination.links)
    yield from _slow(examination)
    yield from _late(examination)


def _unreachable(
    links: Sequence[HostLink], hosts: dict[str, HostFacts]
) -> Iterator[EnvironmentFinding]:
    by_target: dict[tuple[str, str | None], list[HostLink]] = defaultdict(list)
    for link in links:
        tried = [dial for dial in link.dials if dial.purpose == "collective"]
        host = hosts[link.target]
        told = collective_address(host.variables, host.own_addresses, host.interfaces)
        reached = next((dial.address for dial in tried if dial.error is None), None)
        # a name that resolves to loopback has its own finding
        is_elsewhere = told is not None and not is_loopback(told) and reached != told
        if reached is None or is_elsewhere:
            by_target[link.target, reached].append(link)
    for (name, reached), broken in by_target.items():
        if reached is None:
            yield _no_way(name, broken)
        else:
            yield _wrong_interface(hosts[name], reached, broken)


def _no_way(target: str, broken: Sequence[HostLink]) -> EnvironmentFinding:
    sources = tuple(link.source for link in broken)
    dials = [dial for dial in broken[0].dials if dial.purpose == "collective"]
    tried = "; ".join(f"{d.address}:{d.port} {_said(d)}" for d in dials) or "it has no address"
    return EnvironmentFinding(
        "links",
        "error",
        (target,),
        f"cannot be reached from {_list(sources)} on the ports collectives use",
        tried,
        f"allow TCP ports 1024–65535 to {target} from the other hosts (gloo and NCCL use any),"
        " in its firewall and in the cloud's security group",
    )


def _wrong_interface(
    host: HostFacts, reached: str, broken: Sequence[HostLink]
) -> EnvironmentFinding:
    told = collective_address(host.variables, host.own_addresses, host.interfaces)
    names = {each.address: each.name for each in host.interfaces}
    variable = host.variables.get("GLOO_SOCKET_IFNAME")
    because = f"GLOO_SOCKET_IFNAME={variable}" if variable else f"{host.name} → {told}"
    good = names.get(reached, "the interface with that address")
    return EnvironmentFinding(
        "interface",
        "error",
        (host.name,),
        f"its ranks would advertise {told} ({names.get(str(told), 'no interface')}),"
        f" where {_list([link.source for link in broken])} cannot reach it",
        f"{because}; {reached} ({good}) answers",
        f"export GLOO_SOCKET_IFNAME={good} NCCL_SOCKET_IFNAME={good} on {host.name}",
    )


def _blocked_ports(links: Sequence[HostLink]) -> Iterator[EnvironmentFinding]:
    blocked: dict[tuple[str, int], list[tuple[HostLink, Dial]]] = defaultdict(list)
    # a link on which no port works has been reported already
    for link in (each for each in links if any(dial.error is None for dial in each.dials)):
        for dial in link.dials:
            if dial.purpose == "port" and dial.error is not None:
                blocked[link.target, dial.port].append((link, dial))
    for (target, port), cases in blocked.items():
        sources = [link.source for link, _ in cases]
        link, dial = cases[0]
        other = next((d for d in link.dials if d.error is None), None)
        beside = f", port {other.port} answers" if other else ""
        yield EnvironmentFinding(
            "links",
            "error",
            (target,),
            f"port {port} is blocked from {_list(sources)}",
            f"{dial.address}:{port} {_said(dial)} although a server listens there{beside}",
            f"allow TCP port {port} to {target} (`iptables -S INPUT` on {target} shows the rule),"
            " or use another rendezvous port",
        )


def _said(dial: Dial) -> str:
    words = {"silent": "does not answer (packets are dropped)", "refused": "is refused"}
    return "answers" if dial.error is None else words.get(dial.error, dial.error)


def doubtful(links: Sequence[HostLink], expected: Expected) -> set[tuple[str, str]]:
    """Return links to measure again because of low rate or high latency."""
    return set(_slow_links(links, expected)[0]) | set(_late_links(links, expected)[0])


def _slow_links(
    links: Sequence[HostLink], expected: Expected
) -> tuple[dict[tuple[str, str], float], str]:
    """Return the rates below the limit, and a description of what they are compared with."""
    usual = _usual([link.bytes_per_s for link in links])
    if expected.bytes_per_s is not None:
        least = min(expected.bytes_per_s, _ONE_STREAM_BYTES_PER_S) * _SLOW_OF_EXPECTED
        against = f"{_gbit(expected.bytes_per_s)} expected"
    elif usual is not None:
        least = min(usual, _ONE_STREAM_BYTES_PER_S) * _SLOW_OF_MEDIAN
        against = f"{_gbit(usual)} on the median link"
    else:
        return {}, ""
    rates = {(link.source, link.target): link.bytes_per_s for link in links}
    return {
        pair: rate for pair, rate in rates.items() if rate is not None and rate < least
    }, against


def _late_links(
    links: Sequence[HostLink], expected: Expected
) -> tuple[dict[tuple[str, str], float], str]:
    """Return the latencies above the limit, and a description as above."""
    usual = _usual([link.latency_s for link in links])
    if expected.latency_s is not None:
        most = expected.latency_s * _LATE_OF_EXPECTED
        against = f"{expected.latency_s * 1e6:.0f} µs expected"
    elif usual is not None:
        most, against = usual * _LATE_OF_MEDIAN, f"{usual * 1e6:.0f} µs on the median link"
    else:
        return {}, ""
    most = max(most, _NOTICEABLE_S)
    delays = {(link.source, link.target): link.latency_s for link in links}
    return {pair: delay for pair, delay in delays.items() if delay and delay > most}, against


def _slow(examination: Examination) -> Iterator[EnvironmentFinding]:
    slow, against = _slow_links(examination.links, examination.expected)
    for host, sends, others in by_culprit(list(slow)):
        rates = [slow[(host, other) if sends else (other, host)] for other in others]
        yield EnvironmentFinding(
            "bandwidth",
            "warning",
            (host,),
            f"{'sending to' if sends else 'receiving from'} {_list(others)} is slow,"
            " and every collective runs at the speed of the slowest link",
            f"{_gbit(min(rates))} measured, {against}",
            f"check `ethtool` (speed, errors), cable and switch port of {host}, and other"
            " traffic; or exclude the host",
        )


def _late(examination: Examination) -> Iterator[EnvironmentFinding]:
    late, against = _late_links(examination.links, examination.expected)
    for host, sends, others in by_culprit(list(late)):
        delays = [late[(host, other) if sends else (other, host)] for other in others]
        yield EnvironmentFinding(
            "latency",
            "warning",
            (host,),
            f"latency {'to' if sends else 'from'} {_list(others)} is high",
            f"{max(delays) * 1e6:.0f} µs measured, {against}",
            "check that all hosts are in the same network, zone and placement group",
        )


def by_culprit(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, bool, list[str]]]:
    """Group bad links by their most common host; yield it, whether it sends, and its peers."""
    left = list(pairs)
    while left:
        sending = Counter(source for source, _ in left)
        getting = Counter(target for _, target in left)
        (sender, num_sent), (getter, num_got) = (c.most_common(1)[0] for c in (sending, getting))
        if num_sent >= num_got:
            yield sender, True, [target for source, target in left if source == sender]
            left = [pair for pair in left if pair[0] != sender]
        else:
            yield getter, False, [source for source, target in left if target == getter]
            left = [pair for pair in left if pair[1] != getter]


def _usual(measured: Sequence[float | None]) -> float | None:
    values = [value for value in measured if value is not None]
    return median(values) if len(values) >= _FEWEST_TO_COMPARE else None


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f} Gbit/s"


def _list(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
