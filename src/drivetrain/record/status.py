"""Status: an overview of a run, from its directory alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.record.ledger import Ledger, ledger_of
from drivetrain.record.reading import PastAttempt, RunReading, Series

QUIET_S = 60.0
"""A run that has written nothing for longer may be gone, with no process left to record it."""

NO_END = "no end was recorded; unless it is still busy, it was killed or its host is down"
"""What is known of the last attempt of such a run."""


@dataclass(frozen=True)
class Money:
    """What the devices cost while the run held them."""

    spent: float
    productive: float
    """The part spent on productive seconds."""


@dataclass(frozen=True)
class RunStatus:
    """The status of one run."""

    name: str
    state: str
    """running, quiet, finished, failed, stalled, preempted …"""
    reason: str
    step: int
    max_steps: int | None
    num_attempts: int
    lost_starts: tuple[str, ...]
    """How each start ended that opened no attempt; their time is start-up."""
    world_size: int
    layout: str
    device: str
    loss: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    ledger: Ledger
    money: Money | None
    device_s: float = 0.0
    """Device-seconds: seconds that an attempt held its devices, times the devices."""

    @property
    def last_sign_s(self) -> float:
        """When it last wrote anything, in seconds since the epoch."""
        return self.ledger.end_s


def status_of(run: RunReading, now_s: float) -> RunStatus:
    """Return a run's status, from rank 0's events and a sample of the ranks' steps."""
    attempts = run.attempts()
    last = attempts[-1] if attempts else None
    scalars, ledger = run.scalars() if run.ranks else {}, ledger_of(run)
    record: dict[str, Any] = run.config.get("record") or {}
    price = record.get("price_per_device_hour")
    devices = _device_seconds(attempts, ledger)
    facts = last.start if last is not None else {}
    state = _state(run, last, ledger, now_s)
    reason = last.reason if last is not None and last.kind != "finished" else ""
    is_without_end = state == "quiet" and last is not None and last.kind is None
    return RunStatus(
        name=run.name,
        state=state,
        reason=reason or _stopped(run) or (NO_END if is_without_end else ""),
        step=max(run.last_step(), last.last_step if last is not None else 0),
        max_steps=facts.get("total_steps") or run.config.get("max_steps"),
        num_attempts=len(attempts),
        lost_starts=tuple(how for attempt in attempts for how in attempt.lost_starts),
        world_size=last.world_size if last is not None else 0,
        layout=str(facts.get("layout") or ""),
        device=str(facts.get("device_name") or facts.get("device") or ""),
        loss=_newest(scalars, "train/loss"),
        samples_per_s=_newest(scalars, "throughput/samples_per_sec"),
        tokens_per_s=_newest(scalars, "throughput/tokens_per_sec"),
        mfu=_newest(scalars, "throughput/device/mfu"),
        ledger=ledger,
        money=None if price is None else devices.money(float(price)),
        device_s=devices.had,
    )


def _state(run: RunReading, last: PastAttempt | None, ledger: Ledger, now_s: float) -> str:
    if last is None:
        return "starting"
    if last.kind is not None and not last.end.get("restarts"):
        return last.kind
    if last.kind is not None:
        return "restarting" if now_s - ledger.end_s < QUIET_S else "quiet"
    ends = {event.name for event in run.tail(run.ranks[0], 3)} if run.ranks else set()
    if "run_end" in ends:
        return "finished"
    if "run_failed" in ends:
        return "failed"
    return "running" if now_s - ledger.end_s < QUIET_S else "quiet"


def _stopped(run: RunReading) -> str:
    """Return why a run stopped before its last step; empty if it did not."""
    events = run.tail(run.ranks[0], 3) if run.ranks else []
    why = [event.values.get("stopped") for event in events if event.name == "run_end"]
    return f"stopped: {why[-1]}" if why and why[-1] else ""


@dataclass(frozen=True)
class _DeviceSeconds:
    """Seconds that attempts held their devices, times the devices."""

    had: float
    productive: float

    def money(self, price_per_hour: float) -> Money:
        return Money(self.had * price_per_hour / 3600, self.productive * price_per_hour / 3600)


def _device_seconds(attempts: tuple[PastAttempt, ...], ledger: Ledger) -> _DeviceSeconds:
    """Sum device-seconds; idle and preempted time does not count."""
    sizes = {attempt.number: attempt.world_size for attempt in attempts}
    had = productive = 0.0
    size = next(iter(sizes.values()), 0)
    for segment in ledger.segments:
        size = sizes.get(segment.attempt, size)  # between attempts: the previous one's
        unpaid = {"idle", "preempted"}
        had += size * sum(s for name, s in segment.seconds.items() if name not in unpaid)
        productive += size * segment.seconds.get("productive", 0.0)
    return _DeviceSeconds(had, productive)


def _newest(scalars: dict[str, Series], name: str) -> float | None:
    series = scalars.get(name)
    return float(series.values[-1]) if series is not None and len(series) else None
