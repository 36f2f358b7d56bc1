"""AttemptReport: how an attempt ended, written to the run directory by the supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.catalogue import entries
from drivetrain.checkpoint.lineage import read_claims
from drivetrain.checkpoint.storage import storage_at
from drivetrain.core.redaction import clean_text, clean_traceback
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.session import (
    ATTEMPT,
    LAST_ATTEMPT,
    RUN_DIR,
    keeps_all_in_run,
    note_lost_start,
    read_progress,
    run_directory_in,
)
from drivetrain.supervise.failures.failure import RankFailure, by_cause, last_step
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.policy import End, EndKind
from drivetrain.supervise.resources import Facts


@dataclass(frozen=True)
class AttemptReport:
    """All that is known about the end of an attempt on one node."""

    end: End
    failures: Sequence[RankFailure]
    host: str
    detail: str
    why: str
    restarts: bool = False
    """Whether another attempt follows."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Exit codes of the ranks of this node that ended by themselves, including successful ones."""
    ranks: Sequence[int] = ()
    """The ranks of this node."""
    resources: Mapping[int, Facts] = field(default_factory=dict)
    whole: Path | None = None
    """The file for the full traceback of the first failure."""
    has_begun: bool = True
    """Whether a rank has called `Trainer.fit` or `prepare`, in this attempt or before."""
    is_unsaved: bool = False
    """Whether the run certainly has no checkpoint yet."""

    @property
    def how(self) -> str:
        """How it ended, in one line."""
        cause = by_cause(self.failures)[0] if self.failures else None
        how = self.detail or self.end.kind.value
        if cause is not None:
            how = f"rank {cause.rank} {cause.how}" + (f": {cause.said}" if cause.said else "")
        return f"{how}; {self.why}" if self.why else how

    def facts(self) -> dict[str, Any]:
        """Return the content of end.json, the root cause first."""
        return {
            "kind": self.end.kind.value,
            "step": self.end.step,
            "host": self.host,
            "time_s": time.time(),
            "detail": clean_text(self.detail),
            "why": clean_text(self.why),
            "restarts": self.restarts,
            "failures": [
                {
                    "rank": f.rank,
                    "pid": f.pid,
                    "exit_code": f.exit_code,
                    "error": clean_traceback(f.error),
                    "at_s": f.at_s,
                    "is_collateral": f.is_collateral or f.was_ended_by_us,
                }
                for f in by_cause(self.failures)
            ],
            "exits": dict(self.exits),
            "hosts": dict.fromkeys(self.ranks, self.host),
            "resources": dict(self.resources),
        }


def whole_traceback(session: Path, failures: Sequence[RankFailure]) -> Path | None:
    """The file to which `write_end` writes the full traceback; None without a run directory."""
    named = _named(session)
    return traceback_file(*named, by_cause(failures)[0].rank) if named and failures else None


def traceback_file(run: RunDirectory, attempt: int, rank: int) -> Path:
    """The traceback file of a rank, for people (end.json has the same for programs)."""
    return run.attempt(attempt) / "tracebacks" / f"{rank:05d}.txt"


def last_saved_step(session: Path) -> int | None:
    """The newest checkpoint's step; 0 if there certainly is none, None if that is not known.

    Claims are stored where a run saves. Without one, either no attempt has got that far, or the
    checkpoints are elsewhere (at an address that would need a network request); a claim that
    resumes from a step has found a checkpoint.
    """
    given = os.environ.get(RUN_DIR)
    path = run_directory_in(session) or (Path(given) if given else None)
    keeps_all = keeps_all_in_run(session)
    if path is None:
        return 0 if keeps_all else None
    try:
        storage = storage_at(RunDirectory(path).checkpoints)
        claims = read_claims(storage)
        listed = entries(storage, check_sizes=False)
        newest = next((each for each in listed if each.state in ("good", "damaged")), None)
        if newest is not None:
            return newest.step if newest.state == "good" else None
        begins_anew = (bool(claims) or keeps_all) and not any(claim.step for claim in claims)
        return 0 if begins_anew else None
    except Exception:  # it only affects a message: it must not end the supervisor
        return None


def write_closed(session: Path, exit_code: int) -> None:
    """Record when the whole command ended, as the last entry of an attempt."""
    named = _named(session) or _named(session, LAST_ATTEMPT)
    if named is not None:
        run, attempt = named
        with contextlib.suppress(OSError):
            run.close_attempt(attempt, {"time_s": time.time(), "exit_code": exit_code})


def write_lost(session: Path, killed_by: str, *, restarts: bool) -> None:
    """Record the end of an attempt whose supervisor was killed before it could."""
    named = _named(session)
    if named is not None and (named[0].attempt(named[1]) / "end.json").exists():
        if not restarts:
            _take_back_restart(*named, f"the next supervisor was killed by {killed_by}")
        return
    pages = [read_progress(session, rank) for rank in range(len([*session.glob("progress-*")]))]
    end = End(EndKind.FAILED, last_step(pages))
    detail = f"the supervisor was killed by {killed_by} {end.where}"
    write_end(session, AttemptReport(end, (), socket.gethostname(), detail, "", restarts), {})


def _named(session: Path, file: str = ATTEMPT) -> tuple[RunDirectory, int] | None:
    """The attempt that the session's ranks have opened; None if they did not get that far."""
    try:
        run = RunDirectory(Path((session / "run-0").read_text()))
        return run, int((session / file).read_text())
    except (OSError, ValueError):
        return None


def write_end(
    session: Path, account: AttemptReport, dumps: Mapping[int, RankDump]
) -> tuple[Path, int] | None:
    """Write the report into the attempt; return the run directory and the attempt's number."""
    named = _named(session)
    if named is None:
        if not account.restarts:
            _write_last(session, account)
        elif account.end.kind is not EndKind.RESIZED:
            how = account.how if account.failures else f"{account.host}: {account.how}"
            note_lost_start(session, clean_text(how))
        return None
    run, attempt = named
    only_noticed = account.end.kind in (EndKind.PEER, EndKind.RESIZED)
    if only_noticed and (run.attempt(attempt) / "end.json").exists():
        return None  # the node where it happened has reported more
    with contextlib.suppress(OSError):
        for rank, dump in dumps.items():
            is_alive = rank not in account.exits
            if is_alive or dump.stacks:
                text = dump.stacks or "no answer; the process may be stopped\n"
                _write(run.attempt(attempt) / "stacks" / f"{rank:05d}.txt", text)
            if dump.collectives:
                path = run.attempt(attempt) / "collectives" / f"{rank:05d}.json"
                _write(path, dump.collectives)
        for failure in account.failures:
            if "Traceback (most recent call last)" in failure.error:
                _write(traceback_file(run, attempt, failure.rank), clean_traceback(failure.error))
        run.end_attempt(attempt, account.facts())
    return run.path, attempt


def _write_last(session: Path, account: AttemptReport) -> None:
    """Write into the last attempt that none follows: this one ended before it had begun."""
    last = _named(session, LAST_ATTEMPT)
    if last is None:
        return
    _take_back_restart(*last, f"the next attempt ended before it had begun: {account.how}")


def _take_back_restart(run: RunDirectory, attempt: int, why: str) -> None:
    """Record that the restart which was announced at an attempt's end did not come."""
    end = next((each.end for each in run.attempts() if each.number == attempt), None)
    if end and end.get("restarts"):
        with contextlib.suppress(OSError):
            run.end_attempt(attempt, {**end, "restarts": False, "why": clean_text(why)})


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
