"""How an attempt ended, written into the run's directory by its supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.record.run_directory import RunDirectory
from drivetrain.supervise.failure import RankFailure, by_cause
from drivetrain.supervise.policy import End, Kind


@dataclass(frozen=True)
class Account:
    """All that is known."""

    end: End
    failures: Sequence[RankFailure]
    host: str
    detail: str
    why: str
    restarts: bool = False
    """Whether the next attempt follows at once."""

    def facts(self) -> dict[str, Any]:
        """As they are written down, the root cause first."""
        return {
            "kind": self.end.kind.value,
            "step": self.end.step,
            "host": self.host,
            "time_s": time.time(),
            "detail": self.detail,
            "why": self.why,
            "restarts": self.restarts,
            "failures": [
                {"rank": f.rank, "pid": f.pid, "exit_code": f.exit_code, "error": f.error}
                for f in by_cause(self.failures)
            ],
        }


def write_end(session: Path, account: Account, stacks: Mapping[int, str]) -> None:
    """Into the attempt the session's ranks have named; nothing, when they have not come so far."""
    try:
        run = RunDirectory(Path((session / "run-0").read_text()))
        attempt = int((session / "attempt").read_text())
    except (OSError, ValueError):
        return
    only_noticed = account.end.kind in (Kind.PEER, Kind.RESIZED)
    if only_noticed and (run.attempt(attempt) / "end.json").exists():
        return  # the node where it happened has said more
    with contextlib.suppress(OSError):
        for rank, text in stacks.items():
            path = run.attempt(attempt) / "stacks" / f"{rank:05d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text or "no answer: is it stopped?\n")
        run.end_attempt(attempt, account.facts())
