"""Examine every host and every pair of hosts: from channels to an Examination."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from drivetrain.core.errors import EnvironmentProblem
from drivetrain.core.finding import EnvironmentFinding
from drivetrain.doctor.channels import AgentLost, Channel
from drivetrain.doctor.checks.network import doubtful
from drivetrain.doctor.facts import (
    ClockOffset,
    Dial,
    Examination,
    Expected,
    HostFacts,
    HostLink,
    Timeouts,
)
from drivetrain.doctor.network import collective_address, is_loopback

Paired = TypeVar("Paired")

# At most this many rounds: all pairs of 64 hosts; with more hosts each still tests 63 others.
MOST_ROUNDS = 63


def rounds(members: Sequence[Paired], most: int = MOST_ROUNDS) -> list[list[tuple[Paired, Paired]]]:
    """Return rounds of disjoint pairs; with an odd number, one member sits out each round."""
    circle: list[Paired | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(min(most, max(0, len(circle) - 1))):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


_ANY_PORT = 0
_NUM_CLOCK_READINGS = 5
_MOST_AT_ONCE = 64
_NUM_SECOND_LOOKS = 2

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class HostQuestion:
    """What the run will use, and what is therefore examined."""

    ports: tuple[int, ...] = ()
    run_dir: str | None = None
    store: str | None = None
    target: str | None = None
    expected: Expected = field(default_factory=Expected)
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def places(self) -> list[str]:
        """The places the run will write to."""
        return [place for place in (self.run_dir, self.store) if place]


@dataclass(frozen=True)
class ExaminedHost:
    """A host that responded, its agent, and the port opened for each requested one."""

    channel: Channel
    facts: HostFacts
    opened: dict[int, int] = field(default_factory=dict)


def examine(
    channels: Sequence[Channel], question: HostQuestion, say: Callable[[str], None] = lambda _: None
) -> tuple[Examination, list[EnvironmentFinding]]:
    """Examine all hosts; also return a finding for each one that could not be reached."""
    say(f"asking {len(channels)} host{'s' * (len(channels) > 1)}")
    ports, places = list(question.ports), question.places
    answers = _side_by_side(channels, lambda c: _facts(c, ports, places))
    lost = [answer for answer in answers if isinstance(answer, EnvironmentFinding)]
    members = [answer for answer in answers if isinstance(answer, ExaminedHost)]
    clocks = tuple(_clock(member) for member in members) if len(members) > 1 else ()
    links = _links(members, question, say) if len(members) > 1 else ()
    examination = Examination(
        hosts=tuple(member.facts for member in members),
        links=links,
        clocks=clocks,
        expected=question.expected,
        timeouts=question.timeouts,
        target=question.target,
        sees_token=_shared(members, question.run_dir),
    )
    return examination, lost


def _facts(
    channel: Channel, ports: list[int], places: list[str]
) -> ExaminedHost | EnvironmentFinding:
    try:
        answer = channel.ask("facts", ports=ports, places=places)
        return ExaminedHost(channel, TypeAdapter(HostFacts).validate_python(answer))
    except AgentLost as error:
        rule, remedy = error.problems[0].rule, error.problems[0].remedy
    except ValidationError as error:
        rule = f"its answer is invalid ({error.error_count()} facts are missing or wrong)"
        remedy = "is the same Drivetrain installed there?"
    return EnvironmentFinding("reach", "error", (channel.name,), "cannot be examined", rule, remedy)


def _clock(member: ExaminedHost) -> ClockOffset:
    """Measure a clock's offset; the reading with the shortest round trip is the most accurate."""
    best = ClockOffset(member.facts.name, 0.0, float("inf"))
    for _ in range(_NUM_CLOCK_READINGS):
        before = time.time()
        theirs = float(member.channel.ask("clock"))
        after = time.time()
        if (after - before) / 2 < best.uncertainty_s:
            best = ClockOffset(
                member.facts.name, theirs - (before + after) / 2, (after - before) / 2
            )
    return best


def _links(
    members: Sequence[ExaminedHost], question: HostQuestion, say: Callable[[str], None]
) -> tuple[HostLink, ...]:
    listening = _side_by_side(members, lambda member: _listen(member, list(question.ports)))
    found: list[HostLink] = []
    try:
        plan = rounds(listening)
        for number, pairs in enumerate(plan, start=1):
            say(f"testing connections between hosts, round {number} of {len(plan)}")
            found += [link for links in _side_by_side(pairs, _both_ways) for link in links]
        found = _looked_at_twice(found, members, question.expected)
    finally:
        _side_by_side(members, lambda member: member.channel.ask("close_ports"))
    return tuple(sorted(found, key=lambda link: (link.source, link.target)))


def _looked_at_twice(
    links: Sequence[HostLink], members: Sequence[ExaminedHost], expected: Expected
) -> list[HostLink]:
    """Measure slow-looking links again, one at a time: a host may only have been busy."""
    again = doubtful(links, expected)
    by_name = {member.facts.name: member for member in members}
    return [
        _measured_again(link, by_name[link.source]) if (link.source, link.target) in again else link
        for link in links
    ]


def _measured_again(link: HostLink, source: ExaminedHost) -> HostLink:
    reached = next(d for d in link.dials if d.purpose == "collective" and d.error is None)
    best = link
    for _ in range(_NUM_SECOND_LOOKS):
        new = source.channel.ask("measure", address=reached.address, port=reached.port)
        best = replace(
            best,
            latency_s=min(best.latency_s or math.inf, new["latency_s"] or math.inf),
            bytes_per_s=max(best.bytes_per_s or 0.0, new["bytes_per_s"] or 0.0),
        )
    return best


def _listen(member: ExaminedHost, ports: list[int]) -> ExaminedHost:
    opened = member.channel.ask("listen", ports=[*ports, _ANY_PORT])
    return ExaminedHost(member.channel, member.facts, {int(p): o for p, o in opened.items()})


def _both_ways(pair: tuple[ExaminedHost, ExaminedHost]) -> list[HostLink]:
    # one after the other, since they share the link
    return [_link(*pair), _link(*reversed(pair))]


def _link(source: ExaminedHost, target: ExaminedHost) -> HostLink:
    ask = source.channel.ask
    resolved = tuple(ask("resolve", name=target.facts.name))
    dials: list[Dial] = []

    def dial(purpose: str, address: str, port: int) -> bool:
        dials.append(Dial(**ask("dial", purpose=purpose, address=address, port=port)))
        return dials[-1].error is None

    free_port = target.opened[_ANY_PORT]
    addresses = _addresses(target.facts, resolved)
    reached = next((a for a in addresses if dial("collective", a, free_port)), None)
    # test the ports even if nothing responds: a firewall may allow only these
    for port, opened in target.opened.items():
        if port != _ANY_PORT and addresses:
            dial("port", reached or addresses[0], opened)
    measured: dict[str, Any] = {}
    if reached is not None:
        measured = ask("measure", address=reached, port=free_port)
    return HostLink(source.facts.name, target.facts.name, resolved, tuple(dials), **measured)


def _addresses(target: HostFacts, resolved: Sequence[str]) -> list[str]:
    """Return candidate addresses of the target, the one its ranks will advertise first."""
    advertised = collective_address(target.variables, target.own_addresses, target.interfaces)
    own = [interface.address for interface in target.interfaces if interface.is_up]
    candidates = [*([advertised] if advertised else []), *resolved, *own]
    return [a for a in dict.fromkeys(candidates) if not is_loopback(a)]


def _shared(members: Sequence[ExaminedHost], run_dir: str | None) -> dict[str, bool]:
    """Return whether each other host sees a file that the first one has just written."""
    if run_dir is None or "://" in run_dir or len(members) < 2:
        return {}
    name = f".drivetrain-doctor-{uuid.uuid4().hex[:8]}"
    first, *others = members
    try:
        folder = first.channel.ask("leave", folder=run_dir, name=name)
    except EnvironmentProblem:  # not writable at all, which the storage check reports
        return {}
    try:
        seen = _side_by_side(
            others, lambda member: bool(member.channel.ask("sees", folder=folder, name=name))
        )
    finally:
        first.channel.ask("clear", folder=folder, name=name)
    return {member.facts.name: is_seen for member, is_seen in zip(others, seen, strict=True)}


def _side_by_side(items: Sequence[Item], act: Callable[[Item], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=max(1, min(_MOST_AT_ONCE, len(items)))) as pool:
        return list(pool.map(act, items))
