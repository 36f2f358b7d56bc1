"""Which rank failed first, its error, and why the attempt ended. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import (
    ConfigError,
    NonFiniteLoss,
    exception_line,
    raised_by,
    without_blame,
)
from drivetrain.diagnose.finding import listed
from drivetrain.diagnose.stacks import own_calls, traceback_line
from drivetrain.record.session import Phase, RankProgress
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE, End, EndKind

# Which rank failed first, and its error. Pure: from exit codes and errors to one verdict.

# Errors of these types come from the script (a download, for example), whatever their text …
_OWN = re.compile(r"(ConnectionResetError|BrokenPipeError|ConnectionError)\b")
# … all others with this text mean that the rank only noticed the loss of another one.
_COLLATERAL = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|connectFullMesh failed|Socket closed|"
    r"DistNetworkError|DistStoreError|recvValueWithTimeout|failed to recv",
    re.IGNORECASE,
)
# Errors that point to the code, not to its environment.
_MISTAKES = frozenset(
    {
        *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError"),
        *("IndentationError", "KeyError", "ModuleNotFoundError", "NameError", "RecursionError"),
        *("NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError"),
        *("RuntimeError", "ZeroDivisionError"),
    }
)
# Text of a RuntimeError that is not about the code: torch has few other exception types.
_WORLD = re.compile(
    r"CUDA|cuDNN|CUBLAS|NCCL|gloo|hip|memory|connect|timed? ?out|socket|store|device|worker|shm",
    re.IGNORECASE,
)

# Signals that a process raises by what it executes, and would raise again. SIGBUS is not one of
# them: a file or a page of memory that it had mapped is gone.
_CRASHES = frozenset({"SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"})
_USAGE_ERROR = 2
"""The exit code of argparse and click for a usage error."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended; `exit_code` is negative for a signal, as in `subprocess`."""

    rank: int
    pid: int
    exit_code: int
    error: str = ""
    """The rank's traceback, if it was able to write one."""
    at_s: float = 0.0

    @property
    def killed_by(self) -> str | None:
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    @property
    def was_killed_from_outside(self) -> bool:
        """Whether something other than its own code ended it: kill, a scheduler, the kernel."""
        return self.killed_by is not None and comes_from_outside(self.killed_by)

    @property
    def was_ended_by_us(self) -> bool:
        """Whether it ended by SIGTERM, with which the launcher stops the remaining ranks."""
        return self.killed_by == "SIGTERM"

    @property
    def is_collateral(self) -> bool:
        """Whether it failed only because another rank was lost."""
        last_line = without_blame(self.error).strip().rpartition("\n")[2]
        if not self.error or _OWN.match(last_line):
            return False
        return bool(_COLLATERAL.search(last_line))

    @property
    def is_refusal(self) -> bool:
        """Whether the config was rejected: the error lists the problems, without a traceback."""
        is_told = bool(self.error) and not self.error.startswith("Traceback")
        return self.exit_code == ConfigError.exit_code and is_told

    @property
    def said(self) -> str:
        """Its exception in one line; empty if there is none."""
        return exception_line(self.error)

    @property
    def fault(self) -> str:
        """The error in the code and its location; empty if transient (a connection, a device)."""
        name, line = self.said.partition(":")[0], traceback_line(self.error)
        is_torchs = name == "RuntimeError" or name.startswith("torch.")
        if self.is_collateral or (is_torchs and _WORLD.search(self.said)):
            return ""
        if self.raised_by:  # in the user's own code any error counts, with its text
            return f"{self.said} at {line or self.raised_by}"
        is_mistake = name in _MISTAKES and not _WORLD.search(self.said)
        return f"{name} at {line}" if is_mistake and line is not None else ""

    @property
    def raised_by(self) -> str:
        """Which part of the user's code raised it, if known (core/errors.py)."""
        return raised_by(self.error)

    @property
    def how(self) -> str:
        if self.killed_by:
            return f"was killed by {self.killed_by}"
        return f"failed with exit code {self.exit_code}"

    @property
    def process_exit_code(self) -> int:
        """The exit code that a shell would report."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def comes_from_outside(signal_name: str) -> bool:
    """True for a signal that a process does not raise by what it executes."""
    return signal_name not in _CRASHES


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that caused the others."""
    return by_cause(failures)[0]


def by_cause(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the failures, the root cause first."""

    def order(failure: RankFailure) -> tuple[int, float]:
        if failure.was_ended_by_us:
            return 3, failure.at_s
        if failure.is_collateral:
            return 2, failure.at_s
        return (0 if failure.killed_by else 1), failure.at_s

    return sorted(failures, key=order)


def was_aborted(failures: Sequence[RankFailure]) -> bool:
    """True after SIGABRT, probably from gloo on mismatched calls, which the other ranks know."""
    return bool(failures) and root_cause(failures).killed_by == signal.SIGABRT.name


def verdict(
    failures: Sequence[RankFailure],
    host: str,
    whole: Path | None = None,
    *,
    is_starting: bool = False,
) -> str:
    """Return the message for the user: the other ranks in one line, the cause last.

    `whole` is the file with the full traceback; if given, only the user's own calls are shown.
    `is_starting`: it failed before its run was open, so the micro-batch is not to blame.
    """
    cause = root_cause(failures)
    if cause.is_refusal:  # the same on every rank, so that it does not matter which was first
        return cause.error.rstrip()
    how = _how(cause, is_starting=is_starting)
    text = f"rank {cause.rank} (pid {cause.pid}, {host}) failed first: {how}"
    others = sorted(failure.rank for failure in failures if failure is not cause)
    if cause.exit_code == NonFiniteLoss.exit_code:  # each rank finds it by itself
        also = sorted(f.rank for f in failures if f is not cause and f.exit_code == cause.exit_code)
        text += f"\n(the same was found on {listed(also)})" if also else ""
        others = [rank for rank in others if rank not in also]
    if others:
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        text += f"\n({ranks} stopped because of it)"
    if not cause.error:
        return text
    shown = cause.error.rstrip()
    short = own_calls(shown)
    if whole is not None and short != shown:
        text += f"\n(only your own calls are shown; full traceback: {whole})"
        shown = short
    return f"{text}\n\n{shown}"


def _how(failure: RankFailure, *, is_starting: bool) -> str:
    if failure.killed_by == "SIGKILL" and is_starting:
        return (
            "killed by SIGKILL, without a traceback: either something outside the run killed it, "
            "or the kernel did because memory ran out (then `dmesg` says so)"
        )
    if failure.killed_by in _CRASHES and is_starting:
        return (
            f"killed by {failure.killed_by}: native code crashed; PYTHONFAULTHANDLER=1 shows the "
            "Python stack"
        )
    if failure.killed_by == "SIGKILL":
        return (
            "killed by SIGKILL, without a traceback; unless it was killed by hand, the system ran "
            "out of memory (see dmesg), so use a smaller micro_batch_size or fewer ranks"
        )
    if failure.killed_by:
        return f"killed by {failure.killed_by}"
    if failure.exit_code == _USAGE_ERROR and not failure.error:
        return (
            "exit code 2, without a traceback: probably its parser rejected the command line; "
            "the launcher's own flags go before the script"
        )
    return f"exit code {failure.exit_code}"


# Why an attempt ended, from how its ranks ended. Pure.


def classify(
    failures: Sequence[RankFailure],
    pages: Sequence[RankProgress | None],
    *,
    trains: bool,
    has_peers: bool,
) -> End:
    """Classify the end of an attempt; `pages` is the progress that the ranks last recorded."""
    cause = root_cause(failures)
    kind = _kind(failures, pages, has_peers=has_peers)
    code = STALE_CODE if kind is EndKind.STALE else cause.process_exit_code
    was_killed = cause.killed_by is not None
    return End(kind, last_step(pages), code, trains, by_signal=was_killed, fault=cause.fault)


def last_step(pages: Sequence[RankProgress | None]) -> int:
    """Return the last step that any rank has finished; 0 if none has."""
    return max((page.step for page in pages if page is not None), default=0)


def _kind(
    failures: Sequence[RankFailure], pages: Sequence[RankProgress | None], *, has_peers: bool
) -> EndKind:
    codes = {failure.exit_code for failure in failures}
    if codes == {PREEMPTED_CODE}:
        return EndKind.PREEMPTED
    if STALE_CODE in codes:
        return EndKind.STALE
    if has_peers and root_cause(failures).is_collateral:
        return EndKind.PEER
    if all(page is None or page.phase is Phase.STARTING for page in pages):
        return EndKind.START_UP
    return EndKind.FAILED
