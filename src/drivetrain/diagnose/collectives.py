"""Collectives: which ones each rank has called, from torch's flight recorders.

Every rank numbers the collectives of a group as it calls them. Ranks that run the same program call
the same ones in the same order. If they do not, the numbers show which rank differed first; if they
do, the numbers show which rank is behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.diagnose.stacks import Frame, innermost_users

_Signature = tuple[str, tuple[tuple[int, ...], ...]]
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Their sizes may differ between the root and the others."""


@dataclass(frozen=True)
class Call:
    """One collective, as one rank called it."""

    group: str
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool
    frames: tuple[Frame, ...] = ()

    @property
    def signature(self) -> _Signature:
        """What must match on every rank."""
        return self.op, () if self.op in _ROOTED or "gather" in self.op else self.sizes

    @property
    def user_frame(self) -> Frame | None:
        """The innermost call in the user's code that led to it."""
        return innermost_users(self.frames)

    def __str__(self) -> str:
        shapes = " ".join("[" + ", ".join(map(str, size)) + "]" for size in self.sizes)
        return f"{self.op} of shape {shapes}" if shapes else self.op

    @property
    def with_line(self) -> str:
        """The call and the line it was made from."""
        return f"{self} at {self.user_frame}" if self.user_frame else str(self)


@dataclass(frozen=True)
class Calls:
    """One rank's most recent collectives, in call order."""

    calls: tuple[Call, ...]
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each group it belongs to."""

    def of(self, group: str) -> dict[int, Call]:
        return {call.number: call for call in self.calls if call.group == group}

    @property
    def pending(self) -> Call | None:
        """The first call that has not completed."""
        return next((call for call in self.calls if not call.is_done), None)

    @property
    def latest(self) -> Call | None:
        """The pending call, or else the last one: after a failed call none is pending."""
        return self.pending or next(reversed(self.calls), None)


@dataclass(frozen=True)
class CallDifference:
    """The first collective of a group that ranks called differently."""

    group: str
    number: int
    calls: Mapping[int, Call]
    """By rank."""
    odd: tuple[int, ...]
    """The ranks that appear to have deviated."""


def parse_calls(document: Mapping[str, Any]) -> Calls:
    """Parse what a rank has written (supervise/failures/dump_responder.py)."""
    sites = [tuple(Frame(*frame) for frame in frames) for frames in document["sites"]]
    calls = tuple(
        Call(
            group=entry["group"],
            number=entry["number"],
            op=entry["op"],
            sizes=tuple(tuple(size) for size in entry["sizes"]),
            is_done=entry["is_done"],
            frames=sites[entry["site"]],
        )
        for entry in document["calls"]
    )
    return Calls(calls, {name: tuple(ranks) for name, ranks in document["groups"].items()})


def first_difference(by_rank: Mapping[int, Calls]) -> CallDifference | None:
    """Return the first number under which ranks of one group called different collectives."""
    for group, members in _groups(by_rank):
        own = {rank: by_rank[rank].of(group) for rank in members}
        numbers = sorted({number for calls in own.values() for number in calls})
        for number in numbers:
            here = {rank: calls[number] for rank, calls in own.items() if number in calls}
            if len({call.signature for call in here.values()}) > 1:
                return CallDifference(group, number, here, _odd_ones(here, own, number))
    return None


def _odd_ones(
    here: Mapping[int, Call], own: Mapping[int, Mapping[int, Call]], number: int
) -> tuple[int, ...]:
    """Return the minority, or for equal halves the one that broke the run's usual order."""
    votes = Counter(call.signature for call in here.values()).most_common()
    usual = votes[0][0] if len(votes) == 1 or votes[0][1] > votes[1][1] else None
    candidates = {signature for signature, _ in votes}
    if usual is None:
        longest = max(own.values(), key=len)
        before = [longest[n].signature for n in sorted(longest) if n < number]
        usual = _next(before)
        if usual not in candidates:  # a rare call came before: consider these calls only
            usual = _next([signature for signature in before if signature in candidates])
    if usual not in candidates:
        return tuple(here)
    return tuple(rank for rank, call in here.items() if call.signature != usual)


def _next(before: Sequence[_Signature]) -> _Signature | None:
    """Predict the next call from what followed the longest matching sequence of calls."""
    for depth in range(min(8, len(before)), 0, -1):
        tail = before[-depth:]
        followers = Counter(
            before[at + depth]
            for at in range(len(before) - depth)
            if before[at : at + depth] == tail
        )
        if followers:
            return followers.most_common(1)[0][0]
    return None


def presumed(by_rank: Mapping[int, Calls], frames: tuple[Frame, ...]) -> Call | None:
    """Guess the call of a rank without a record from its stack: an earlier call at that line.

    It gets the number of the call that the other ranks wait in.
    """
    latest = [calls.latest for calls in by_rank.values() if calls.latest is not None]
    if not latest:
        return None
    here = min(latest, key=lambda call: call.number)
    alike = [
        call
        for calls in by_rank.values()
        for call in calls.calls
        if call.number < here.number and call.group == here.group and _is_site(call, frames)
    ]
    if not alike:
        return None
    return replace(alike[-1], number=here.number, is_done=False)


def _is_site(call: Call, frames: tuple[Frame, ...]) -> bool:
    """Whether a call was made where a stack is; a call's record has no library frames."""
    own = tuple(frame for frame in frames if frame in call.frames)
    return bool(call.frames) and own[:1] == call.frames[:1]


@dataclass(frozen=True)
class Behind:
    """Ranks that have not reached a collective that others wait in."""

    call: Call
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def behind(by_rank: Mapping[int, Calls]) -> list[Behind]:
    """Return which ranks are missing, for each group with a waiting rank; fewest missing first."""
    found = []
    for group, members in _groups(by_rank):
        last = {rank: max(by_rank[rank].of(group), default=-1) for rank in members}
        waiting = {
            rank: call
            for rank in last
            for call in by_rank[rank].of(group).values()
            if not call.is_done
        }
        if not waiting:
            continue
        call = min(waiting.values(), key=lambda call: call.number)
        missing = tuple(sorted(rank for rank, number in last.items() if number < call.number))
        waiters = tuple(sorted(rank for rank, number in last.items() if number >= call.number))
        found.append(Behind(call, waiters, missing))
    return sorted(found, key=lambda each: (not each.missing, len(each.missing)))


def _groups(by_rank: Mapping[int, Calls]) -> list[tuple[str, list[int]]]:
    """Return each group with its ranks that have a record; two may share a name, but no rank."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, calls in sorted(by_rank.items()):
        for group, ranks in calls.groups.items():
            found.setdefault((group, ranks), []).append(rank)
    return [(group, members) for (group, _), members in sorted(found.items())]
