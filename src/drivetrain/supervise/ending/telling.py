"""How an attempt ended, told: to the user at once, to later readers in the run's directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.run import explain_attempt
from drivetrain.supervise.ending.account import Account, write_end
from drivetrain.supervise.ending.testimony import Testimony


def say(text: str) -> None:
    """To the user."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_down(
    session: Path, account: Account, testimonies: Mapping[int, Testimony]
) -> Finding | None:
    """Into the run's directory; the verdict on it, in which a mistake must not end a run."""
    written = write_end(session, account, testimonies)
    if written is None:
        return None
    try:
        return explain_attempt(*written)
    except Exception as error:
        say(f"no verdict: {type(error).__name__}: {error}")
        return None
