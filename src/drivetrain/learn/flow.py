"""The ranks' logs: which rank sent what to which, in which round, and what never arrived."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.cluster.exchange import passes
from drivetrain.core.text import readable_bytes

_MAX_ROUNDS_SHOWN = 14
_MAX_MESSAGES_SHOWN = 8
_UNCOUNTED = ("barrier",)


@dataclass
class RecordedCall:
    """One recorded call of a rank."""

    index: int
    kind: str
    peer: int | None
    num_bytes: int
    tag: int
    line: int
    is_done: bool = False
    has_changed: bool = False
    ranks: tuple[int, ...] = ()
    """Ranks of its group; empty means all ranks."""
    left_bytes: int | None = None
    """Bytes that left the rank, if the call itself determines it."""
    elements: str = ""
    """Number and dtype of the elements of a point-to-point message: "4 float64"."""

    def sent_bytes(self, num_ranks: int) -> float:
        """Bytes that each rank of the group sends, with the best algorithm."""
        if self.left_bytes is not None:
            return self.left_bytes
        if not self.num_bytes:
            return 0
        return passes(_as_planned(self.kind), len(self.ranks) or num_ranks) * self.num_bytes


@dataclass
class RankLog:
    """One rank's calls in one section, in the order of posting and of completion."""

    rank: int
    calls: dict[int, RecordedCall] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Marks of the check: all calls with a smaller index had been posted before."""

    @property
    def pending(self) -> list[RecordedCall]:
        return [call for call in self.calls.values() if not call.is_done]

    def of(self, kind: str) -> list[RecordedCall]:
        return [call for call in self.calls.values() if call.kind == kind]

    @property
    def collectives(self) -> list[RecordedCall]:
        return [call for call in self.calls.values() if call.kind not in ("send", "recv")]

    def sent_bytes(self, num_ranks: int) -> float:
        """Bytes that left this rank; collectives are counted with the best algorithm."""
        direct = sum(call.num_bytes for call in self.of("send"))
        return direct + sum(call.sent_bytes(num_ranks) for call in self.collectives)


def _as_planned(kind: str) -> str:
    return kind.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")


@dataclass
class RankRecord:
    """Everything that one rank recorded."""

    rank: int
    sections: dict[str, RankLog]
    error: dict[str, Any] | None
    notes: list[dict[str, Any]]
    has_begun: bool
    """Whether the rank got as far as the learner's file."""


def read_record(file: Path, rank: int) -> RankRecord:
    """Read a rank's log; one that was killed leaves at most half a line."""
    current = RankLog(rank)
    record = RankRecord(rank, {"": current}, None, [], file.exists())
    posted_in: dict[int, RankLog] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "section" in entry:
            current = record.sections.setdefault(entry["section"], RankLog(rank))
        elif "error" in entry:
            record.error = entry
        elif "note" in entry:
            record.notes.append(entry["note"])
        elif "mark" in entry:
            current.marks[entry["mark"]] = entry["before"]
        elif "call" in entry:
            call = RecordedCall(
                entry["call"],
                entry["kind"],
                entry["peer"],
                entry["bytes"],
                entry["tag"],
                entry["line"],
                ranks=tuple(entry["ranks"]),
                left_bytes=entry["left"],
                elements=entry.get("elements", ""),
            )
            current.calls[call.index] = call
            current.events.append(("posted", call.index))
            posted_in[call.index] = current
        elif entry["done"] in posted_in:
            log = posted_in[entry["done"]]
            call = log.calls[entry["done"]]
            call.is_done, call.has_changed = True, entry["changed"]
            call.peer = call.peer if call.peer is not None else entry["peer"]
            log.events.append(("done", call.index))
    return record


@dataclass(frozen=True)
class Flow:
    """One section of all ranks."""

    logs: tuple[RankLog, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.logs)

    def sent(self) -> list[float]:
        return [log.sent_bytes(self.num_ranks) for log in self.logs]

    def mismatched(self) -> list[tuple[int, int, RecordedCall, RecordedCall]]:
        """Messages whose sizes differ between sender and receiver: from, to, send, receive."""
        return [
            (source, target, send, receive)
            for (source, target, _), (sends, receives) in self._channels().items()
            for send, receive in zip(sends, receives, strict=False)
            if send.num_bytes != receive.num_bytes
        ]

    def _channels(
        self,
    ) -> dict[tuple[int, int, int], tuple[list[RecordedCall], list[RecordedCall]]]:
        channels: dict[tuple[int, int, int], tuple[list[RecordedCall], list[RecordedCall]]] = (
            defaultdict(lambda: ([], []))
        )
        for log in self.logs:
            for call in log.calls.values():
                if call.peer is None:
                    continue
                if call.kind == "send":
                    channels[log.rank, call.peer, call.tag][0].append(call)
                elif call.kind == "recv":
                    channels[call.peer, log.rank, call.tag][1].append(call)
        return channels

    def rounds(self) -> list[list[tuple[int, int, int]]]:
        """Messages (from, to, bytes) that arrived; in a round a rank sends one and receives one.

        A message leaves one round after everything that its sender had received or sent before,
        and is listed in the round in which it arrives.
        """
        by_round: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, source, target, size in _numbered(self.logs):
            by_round[number].append((source, target, size))
        return [sorted(by_round[number]) for number in range(1, max(by_round, default=0) + 1)]

    def waiting(self) -> list[str]:
        """Describe what each rank was waiting for."""
        lines = []
        for log in self.logs:
            stuck = log.pending[-1:] if log.pending else []
            for call in stuck:
                words = {
                    "send": f"send to rank {call.peer}",
                    "recv": f"receive from rank {call.peer}",
                }.get(call.kind, f"finish {call.kind}")
                lines.append(
                    f"rank {log.rank} waits to {words} ({readable_bytes(call.num_bytes)}),"
                    f" line {call.line}"
                    + ("" if self._has(call.peer) else f": there is no rank {call.peer}")
                )
        return lines

    def _has(self, peer: int | None) -> bool:
        return peer is None or 0 <= peer < self.num_ranks

    def picture(self) -> str:
        """The rounds as text."""
        rounds = self.rounds()
        lines = [
            f"round {number:2d}   {_drawn(messages)}"
            for number, messages in enumerate(rounds[:_MAX_ROUNDS_SHOWN], 1)
        ]
        if len(rounds) > _MAX_ROUNDS_SHOWN:
            lines.append(f"… and {len(rounds) - _MAX_ROUNDS_SHOWN} more rounds")
        lines += self._drawn_collectives()
        return "\n".join(lines)

    def _drawn_collectives(self) -> list[str]:
        counted: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * self.num_ranks)
        for log in self.logs:
            for call in log.collectives:
                if call.kind not in _UNCOUNTED:
                    counted[call.kind, call.num_bytes][log.rank] += 1
        lines = []
        for (kind, num_bytes), times in list(counted.items())[:_MAX_MESSAGES_SHOWN]:
            what = f"{kind} of {readable_bytes(num_bytes)}"
            same = len(set(times)) == 1
            lines.append(f"{times[0]} × {what}" if same else f"{what}: {_by_ranks(times)}")
        if len(counted) > _MAX_MESSAGES_SHOWN:
            lines.append(f"… and {len(counted) - _MAX_MESSAGES_SHOWN} other collectives")
        return lines


def _by_ranks(times: Sequence[int]) -> str:
    parts = []
    for number in sorted(set(times)):
        ranks = [str(rank) for rank, each in enumerate(times) if each == number]
        parts.append(f"{number} × on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return ", ".join(parts)


def _drawn(messages: Sequence[tuple[int, int, int]]) -> str:
    shown = [f"{a} → {b} {readable_bytes(size)}" for a, b, size in messages[:_MAX_MESSAGES_SHOWN]]
    more = len(messages) - len(shown)
    return "   ".join(shown) + (f"   … {more} more" if more else "")


def _numbered(logs: Iterable[RankLog]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (round, from, to, bytes) of received messages, by what their senders knew before."""
    on_their_way: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    todo = {log.rank: (log, list(log.events)) for log in logs}
    knows: dict[int, int] = defaultdict(int)
    last_sent: dict[int, int] = defaultdict(int)
    last_received: dict[int, int] = defaultdict(int)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, (log, events) in todo.items():
            while events:
                what, index = events[0]
                call = log.calls[index]
                if call.kind == "send" and what == "posted" and call.peer is not None:
                    last_sent[rank] = max(knows[rank], last_sent[rank]) + 1
                    sent = (last_sent[rank], call.num_bytes)
                    on_their_way[rank, call.peer, call.tag].append(sent)
                elif call.kind == "recv" and what == "done" and call.peer is not None:
                    arriving = on_their_way[call.peer, rank, call.tag]
                    if not arriving:
                        break  # its sender comes first
                    sent_in, size = arriving.pop(0)
                    last_received[rank] = max(sent_in, last_received[rank] + 1)
                    knows[rank] = max(knows[rank], last_received[rank])
                    yield last_received[rank], call.peer, rank, size
                events.pop(0)
                is_moving = True
