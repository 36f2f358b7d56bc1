"""How an attempt ended, told: to the user at once, to later readers in the run's directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from drivetrain.diagnose.evidence import Evidence, calls_of
from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.run import explain_attempt, judge_attempt
from drivetrain.diagnose.stacks import parse_stacks
from drivetrain.supervise.failures.attempt_report import AttemptReport, write_end
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.policy import Kind


def say(text: str) -> None:
    """To the user."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_down(
    session: Path, account: AttemptReport, dumps: Mapping[int, RankDump]
) -> Finding | None:
    """Into the run's directory; the verdict on it, in which a mistake must not end a run."""
    written = write_end(session, account, dumps)
    try:
        if written is not None:
            return explain_attempt(*written)
        if account.end.kind is Kind.STALLED:  # a script that has no run directory
            return judge_attempt(_evidence(account, dumps))
        return None
    except Exception as error:
        say(f"no verdict: {type(error).__name__}: {error}")
        return None


def _evidence(account: AttemptReport, dumps: Mapping[int, RankDump]) -> Evidence:
    told = {rank: calls_of(each.collectives) for rank, each in dumps.items()}
    return Evidence(
        attempt=1,
        end=json.loads(json.dumps(account.facts())),  # as it would have been read back
        stacks={rank: parse_stacks(each.stacks) for rank, each in dumps.items()},
        calls={rank: calls for rank, calls in told.items() if calls is not None},
    )
