"""Failure detection: on a simulated clock, then on processes that are killed and stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.learn.attempt import Shortcoming, in_this_process
from drivetrain.learn.members import Members, wait_until
from drivetrain.learn.verdict import Passed, Score

_INTERVAL_S, _SLOW_S, _DEAD_S = 0.1, 0.8, 2.0
_NORMAL, _BUSY, _KILLED, _STOPPED = range(4)
_NAMES = ("trains", "is in a long step", "is killed with -9", "is stopped")


def check(file: Path) -> Passed:
    in_this_process(file, _judge_on_paper)
    named_s: float = in_this_process(file, lambda module: _judged(module, file))
    return Passed(
        [
            "8 sequences of events on a simulated clock",
            "4 processes: one trains, one is in a long step (slow), one is killed with -9 (dead),"
            " one is stopped (dead) and continued (alive again)",
        ],
        [Score("until a killed rank is named", round(named_s, 2), _DEAD_S, "dead_after_s", "s")],
    )


Event = tuple[float, int, int]
"""Seconds, and what is read at that time: beats, steps."""
_COURSES: tuple[tuple[str, str, Sequence[Event], float, str], ...] = (
    # what it tests, the hint, what is read, when state() is called, the right answer
    ("no rank has beaten yet", "begins-dead", (), 1.0, "alive"),
    ("no beat ever", "begins-dead", (), 12.0, "dead"),
    ("beats and steps", "wrong-state", ((1, 1, 1), (2, 2, 2), (3, 3, 3)), 3.5, "alive"),
    ("beats without steps", "wrong-state", tuple((t, t, 1) for t in range(1, 9)), 8.5, "slow"),
    ("no beat, and no step", "dead-as-slow", ((1, 1, 1),), 15.0, "dead"),
    ("the same beat is read again and again", "same-beat", tuple((t, 1, 1) for t in range(1, 20)),
     19.5, "dead"),
    ("silent for a long time, then beats and steps again", "never-recovers",
     ((1, 1, 1), (15, 2, 2)), 15.5, "alive"),
    ("restarted: it counts from 1", "restarted",
     ((1, 50, 40), (2, 51, 41), (13, 1, 1)), 13.5, "alive"),
)  # fmt: skip


def _judge_on_paper(module: ModuleType) -> None:
    """Slow after 5 s, dead after 10 s; the clock begins at 1000."""
    for what, hint, events, asked_s, right in _COURSES:
        detector = module.Detector(2, 5.0, 10.0, 1000.0)
        asked = iter(events)
        upcoming = next(asked, None)
        for tenth in range(int(asked_s * 10) + 1):
            now_s = tenth / 10
            while upcoming is not None and upcoming[0] <= now_s:
                detector.observe(1, upcoming[1], upcoming[2], 1000.0 + now_s)
                upcoming = next(asked, None)
            detector.state(1, 1000.0 + now_s)
        found = detector.state(1, 1000.0 + asked_s)
        if found != right:
            raise Shortcoming(
                _refined(hint, found, right),
                f'"{right}" after {asked_s:g} s (slow after 5 s, dead after 10 s)',
                f'"{found}"',
                where=what,
            )


def _refined(hint: str, found: Any, right: str) -> str:
    if found not in ("alive", "slow", "dead"):
        return "wrong-state"
    return "slow-as-dead" if (found, right) == ("dead", "slow") else hint


def _member(module: Any, store: Any, rank: int) -> None:
    heartbeat = module.Heartbeat(store, rank, _INTERVAL_S)
    heartbeat.start()
    store.set(f"begun/{rank}", "1")
    step = 0
    while not store.check(["end"]):
        time.sleep(30.0 if rank == _BUSY and step == 5 else 0.05)
        heartbeat.step_done()
        step += 1
    heartbeat.stop()


def _judged(module: ModuleType, file: Path) -> float:
    """Try again: on a busy machine a correct one may be late; a wrong one fails each time."""
    for tries_left in (2, 1, 0):
        try:
            return _observed(module, file)
        except Shortcoming as found:
            if tries_left == 0 or found.hint not in ("false-alarm", "late", "never-recovers"):
                raise
    raise AssertionError


def _observed(module: ModuleType, file: Path) -> float:
    with Members(file) as members:
        store = members.store
        _judge_read(module, store)
        for rank in range(4):
            members.start(f"rank {rank}", _member, rank)
        if not wait_until(lambda: store.check([f"begun/{r}" for r in range(4)]), 20.0):
            members.failed()
            raise Shortcoming("endless", "Heartbeat.start() returns", "it does not")
        watch = _Watch(module, store, members)
        watch.until(_SLOW_S + 1.2, {_NORMAL: "alive", _KILLED: "alive", _STOPPED: "alive"})
        watch.require({_NORMAL: "alive", _BUSY: "slow"})
        members.send_signal(f"rank {_KILLED}", signal.SIGKILL)
        members.send_signal(f"rank {_STOPPED}", signal.SIGSTOP)
        killed_s = time.monotonic()
        watch.until(_DEAD_S + 1.5, {_NORMAL: "alive", _BUSY: "slow"})
        watch.require({_NORMAL: "alive", _BUSY: "slow", _KILLED: "dead", _STOPPED: "dead"})
        members.send_signal(f"rank {_STOPPED}", signal.SIGCONT)
        watch.until(1.0, {_NORMAL: "alive", _BUSY: "slow"})
        watch.require({_STOPPED: "alive"}, "never-recovers")
        store.set("end", "1")
        if not members.has_ended(f"rank {_NORMAL}", 5.0):
            expected = "after stop() the process can exit"
            raise Shortcoming("thread-lives-on", expected, "it is still running after 5 s")
        return watch.dead_at_s[_KILLED] - killed_s


def _judge_read(module: ModuleType, store: Any) -> None:
    expected = "read() returns (0, 0) immediately for a rank that never sent a beat"
    try:
        found = module.read(store, 99)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        raise Shortcoming("read-waits", expected, f"it waited, and then raised {error}") from error
    if found != (0, 0):
        raise Shortcoming("read-waits", expected, f"{found}")


class _Watch:
    """The observer: reads often, and remembers when a rank was reported dead."""

    def __init__(self, module: Any, store: Any, members: Members) -> None:
        self._module, self._store, self._members = module, store, members
        self._detector = module.Detector(4, _SLOW_S, _DEAD_S, time.monotonic())
        self.states: dict[int, str] = {}
        self.dead_at_s: dict[int, float] = {}

    def until(self, seconds: float, always: dict[int, str]) -> None:
        """Observe for `seconds`; ranks in `always` must never be reported dead."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for rank in range(4):
                beats, steps = self._module.read(self._store, rank)
                now_s = time.monotonic()
                self._detector.observe(rank, beats, steps, now_s)
                self.states[rank] = self._detector.state(rank, now_s)
                if self.states[rank] == "dead":
                    self.dead_at_s.setdefault(rank, now_s)
                    if rank in always:
                        raise self._wrong(rank, always[rank], "false-alarm")
            self._members.failed()
            time.sleep(0.05)

    def require(self, right: dict[int, str], hint: str = "") -> None:
        for rank, state in right.items():
            if self.states[rank] != state:
                raise self._wrong(rank, state, hint or ("late" if state == "dead" else "no-steps"))

    def _wrong(self, rank: int, state: str, hint: str) -> Shortcoming:
        if rank == _BUSY and self.states[rank] == "dead":
            hint = "beats-with-steps"
        elif rank == _BUSY:
            hint = "no-steps"
        return Shortcoming(
            hint,
            f'a rank that {_NAMES[rank]} is "{state}" (slow after {_SLOW_S:g} s, dead after'
            f" {_DEAD_S:g} s)",
            f'"{self.states[rank]}"',
            where=f"rank {rank} of 4 processes",
        )
