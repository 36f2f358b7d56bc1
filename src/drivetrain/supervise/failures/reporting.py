"""Reporting how an attempt ended: to the user at once, and in the run directory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from drivetrain.diagnose.evidence import Evidence, calls_of
from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.finding import Kind as diagnosis  # noqa: N813 - an End has a Kind too
from drivetrain.diagnose.run import explain_attempt, judge_attempt
from drivetrain.diagnose.stacks import parse_stacks, traceback_line
from drivetrain.record.plain_run import AGAIN, resume_with_launcher
from drivetrain.supervise.failures.attempt_report import AttemptReport, write_end
from drivetrain.supervise.failures.failure import RankFailure, root_cause, verdict
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.policy import End, EndKind

# The message about an attempt's end: what failed, where, when, and what is done about it.


def lost_replica(end: End, failure: RankFailure, host: str) -> str:
    """The message when a live run continues without one of its replicas."""
    when = time.strftime("%H:%M:%S")
    return (
        f"[{when}] replica {failure.rank} (pid {failure.pid}, {host}) {failure.how} {end.where}; "
        "the others continue, and it is restarted"
    )


def stopped(end: End, asked_by: str, saved_step: int | None, run_dir: Path | None) -> str:
    """The message when a training run was asked to stop; of `saved_step`, None means unknown."""
    if end.kind is EndKind.FINISHED:
        return f"{asked_by} arrived as the last step ended; the run is finished"
    if end.kind is EndKind.PREEMPTED and end.step and saved_step in (None, end.step):
        resume = resume_with_launcher(run_dir)
        return f"stopped by {asked_by} and saved after step {end.step}; {resume}"
    return f"stopped by {asked_by} {end.where}; {kept(saved_step, run_dir)}"


def kept(saved_step: int | None, run_dir: Path | None) -> str:
    """What is left of a run that could not save; of `saved_step`, None means unknown."""
    if saved_step == 0:
        return f"there is no checkpoint yet: {AGAIN} to start from the beginning"
    resume = resume_with_launcher(run_dir)
    return f"the newest checkpoint is of step {saved_step}: {resume}" if saved_step else resume


def with_verdict(text: str, finding: Finding | None, *, is_written_down: bool = True) -> str:
    """Append the diagnosis to the message, without what a traceback in it already says."""
    if finding is None or finding.kind is diagnosis.CRASH:
        return text
    if finding.remedy in text:  # the error gave it; the diagnosis may add the line
        return f"{text}\n  {finding.what}" if finding.line else text
    grounds = () if is_written_down else finding.evidence
    shown = "".join(f"\n    · {ground}" for ground in grounds)
    return f"{text}\n  {finding.what}\n  → {finding.remedy}{shown}"


def _mistake(cause: RankFailure, end: End, run_dir: Path | None) -> str:
    """One sentence on an error in the user's code: what raised it, when, where, what to do."""
    if not cause.fault or not end.trains:  # another script has its own way to resume
        return ""
    line = traceback_line(cause.error)
    is_fit = bool(cause.raised_by) and line is not None and line.function == "<module>"
    at = f", at {line}" if line is not None and not is_fit else ""  # not the line that calls fit()
    who = cause.raised_by or "your code"
    when = "" if "after step" in who else f" {end.where}"
    again = "run the same command again" if run_dir is None else resume_with_launcher(run_dir)
    return f"\n\n{who} raised this{when}{at}: {_remedy(who)}; {again}"


def _remedy(who: str) -> str:
    if "__getitem" in who:
        return "fix it, or leave that sample out of the dataset"
    if "(collate)" in who:
        return (
            "make the samples compatible, or pass a DataLoader with a collate_fn that combines them"
        )
    return "fix it"


def paragraph(account: AttemptReport) -> str:
    end, failures, host = account.end, account.failures, account.host
    when = time.strftime("%H:%M:%S")
    where = end.where
    match end.kind:
        case EndKind.STALLED:
            kept = "; the ranks' stacks were saved" if end.trains else ""
            what = f"{host}: {account.detail}{kept}"
        case EndKind.PREEMPTED:
            what = f"the ranks were asked to stop and saved {where}"
        case EndKind.RESIZED:
            what = f"nodes joined or left {where}"
        case EndKind.PEER:
            what = f"{host}: a rank on another node ended {where}"
        case EndKind.STALE:
            what = "another attempt has taken over the run"
        case _ if failures and account.restarts:
            cause = root_cause(failures)
            what = f"rank {cause.rank} (pid {cause.pid}, {host}) {cause.how} {where}"
            what += f": {cause.said}" if cause.said else ""
        case _ if failures:
            whole = account.whole if account.whole and account.whole.exists() else None
            is_starting = account.whole is None and not end.step  # no attempt had been opened
            what = verdict(failures, host, whole, is_starting=is_starting)
            run_dir = whole.parents[3] if whole else None  # runs/mine/attempts/1/tracebacks/0.txt
            what += _mistake(root_cause(failures), end, run_dir)
        case _:
            what = f"{host}: {account.detail or 'ended'} {where}"
    done = _what_follows(account)
    reason = f" ({account.why})" if account.why else ""
    if not account.restarts and failures:
        # the cause comes last, where the user looks first; no reason: restarts do not apply
        return (f"\nnot restarted: {account.why}" if account.why else "") + f"\n{what}"
    return f"[{when}] {what}; {done}{reason}"


def _what_follows(account: AttemptReport) -> str:
    if not account.restarts:
        return "stopping"
    if not account.has_begun:
        return "restarting"
    if account.is_unsaved:
        return "restarting from the beginning, as there is no checkpoint yet"
    return "restarting from the newest checkpoint"


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_down(
    session: Path, account: AttemptReport, dumps: Mapping[int, RankDump]
) -> Finding | None:
    """Write the report to the run directory; return the diagnosis, whose bugs end no run."""
    written = write_end(session, account, dumps)
    try:
        if written is not None:
            return explain_attempt(*written)
        if account.end.kind is EndKind.STALLED or account.end.by_signal:  # no run directory yet
            return judge_attempt(_evidence(account, dumps))
        return None
    except Exception as error:
        say(f"no verdict: {type(error).__name__}: {error}")
        return None


def _evidence(account: AttemptReport, dumps: Mapping[int, RankDump]) -> Evidence:
    told = {rank: calls_of(each.collectives) for rank, each in dumps.items()}
    return Evidence(
        attempt=1,
        end=json.loads(json.dumps(account.facts())),  # as it would be read back
        stacks={rank: parse_stacks(each.stacks) for rank, each in dumps.items()},
        calls={rank: calls for rank, calls in told.items() if calls is not None},
    )
