"""What a run's small files say: its attempts, its state, its config, what it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from drivetrain.config.keys import flatten
from drivetrain.record.ledger import CLASSES, Ledger
from drivetrain.record.reading import PastAttempt, RunReading
from drivetrain.record.status import QUIET_S
from drivetrain.view.run_view import AttemptView, LedgerView

_HIDDEN_FACTS = ("started_s", "launched_s", "command_s", "resumed_step")
_BINS = 120


def describe_attempts(
    attempts: Sequence[PastAttempt], last_sign_s: float, last_step: int, ending: str = ""
) -> list[AttemptView]:
    """Each with an end: its own, the next one's beginning, or the last sign of life.

    `ending` is how the last one itself says it ended, for when no supervisor does.
    """
    shown = []
    for attempt, after in pairwise([*attempts, None]):
        if attempt is None:
            continue
        begun_s = attempt.launched_s
        limit_s = last_sign_s if after is None else after.launched_s
        end_s = attempt.end_s if attempt.end_s is not None else max(limit_s, begun_s)
        # of an attempt that nobody could speak for, only its successor's beginning is known
        step = attempt.last_step or (last_step if after is None else after.resumed_step)
        shown.append(
            AttemptView(
                number=attempt.number,
                start_s=begun_s,
                end_s=end_s,
                kind=attempt.kind or ("lost" if after is not None else ending or "running"),
                first_step=min(attempt.resumed_step + 1, max(step, 1)),
                last_step=step,
                num_ranks=attempt.world_size,
                host=attempt.host,
                what=attempt.reason,
            )
        )
    return shown


def state_of(
    past: Sequence[PastAttempt], shown: Sequence[AttemptView], last_sign_s: float, now_s: float
) -> str:
    """In the words of `drivetrain status`."""
    if not shown:
        return "starting"
    is_quiet = now_s - last_sign_s >= QUIET_S
    if past[-1].end.get("restarts"):
        return "quiet" if is_quiet else "restarting"
    return "quiet" if is_quiet and shown[-1].kind == "running" else shown[-1].kind


def facts_of(attempts: Sequence[PastAttempt]) -> dict[str, str]:
    """What the last attempt began with, as it was written down."""
    if not attempts:
        return {}
    return {
        name.replace("_", " "): str(value)
        for name, value in attempts[-1].start.items()
        if name not in _HIDDEN_FACTS and value not in (None, "")
    }


def config_of(run: RunReading) -> dict[str, tuple[str, str]]:
    """Dotted key → (value, who said so)."""
    sources: Mapping[str, Any] = run.sources
    return {
        key: (_said(value), str(sources.get(key, "default")))
        for key, value in flatten(run.config).items()
    }


def total_steps_of(run: RunReading) -> int | None:
    """As the config has it; None for a run that counts epochs."""
    steps = run.config.get("max_steps")
    return steps if isinstance(steps, int) else None


def ledger_view(ledger: Ledger, num_bins: int = _BINS) -> LedgerView | None:
    """The ledger in even pieces of the wall clock."""
    if ledger.wall_s <= 0:
        return None
    edges_s = np.linspace(0.0, ledger.wall_s, num_bins + 1)
    over_time = {name: np.zeros(num_bins) for name in CLASSES}
    for segment in ledger.segments:
        begin_s, end_s = segment.start_s - ledger.start_s, segment.end_s - ledger.start_s
        if end_s <= begin_s:
            continue
        inside_s = np.minimum(edges_s[1:], end_s) - np.maximum(edges_s[:-1], begin_s)
        share = np.maximum(inside_s, 0.0) / (end_s - begin_s)
        for name, seconds in segment.seconds.items():
            over_time[name] += share * seconds
    taken = {name: seconds for name, seconds in ledger.seconds.items() if seconds > 0}
    return LedgerView(taken, edges_s, {name: over_time[name] for name in taken})


def _said(value: Any) -> str:
    return "" if value is None else str(value)
