"""Which rank failed first, what it said, and why the attempt ended. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import ConfigError, exception_line, raised_by, without_blame
from drivetrain.diagnose.stacks import own_calls, traceback_line
from drivetrain.record.session import Phase, RankProgress
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE, End, EndKind

# Which rank failed first, and what it said. Pure: from exit facts to one verdict.

# What a rank says when it only noticed that another one is gone.
# These are a script's own (a download, say), whatever their text.
_OWN = re.compile(r"(ConnectionResetError|BrokenPipeError|ConnectionError)\b")
_COLLATERAL = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|connectFullMesh failed|Socket closed|"
    r"DistNetworkError|DistStoreError|recvValueWithTimeout|failed to recv",
    re.IGNORECASE,
)
# Errors that say something about the code, and nothing about the world around it.
_MISTAKES = frozenset(
    {
        *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "IndexError"),
        *("IndentationError", "KeyError", "ModuleNotFoundError", "NameError", "RecursionError"),
        *("NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError"),
        *("RuntimeError", "ZeroDivisionError"),
    }
)
# What a RuntimeError says when it is not about the code: torch has few other types.
_WORLD = re.compile(
    r"CUDA|cuDNN|CUBLAS|NCCL|gloo|hip|memory|connect|timed? ?out|socket|store|device|worker|shm",
    re.IGNORECASE,
)

_USAGE_ERROR = 2
"""argparse's and click's exit code."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended. `exit_code` is negative for a signal, as Python has it."""

    rank: int
    pid: int
    exit_code: int
    error: str = ""
    """The rank's own traceback, when it had the chance to leave one."""
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
    def was_ended_by_us(self) -> bool:
        """The launcher ends the remaining ranks with SIGTERM."""
        return self.killed_by == "SIGTERM"

    @property
    def is_collateral(self) -> bool:
        """Whether it only noticed that another rank is gone."""
        last_line = without_blame(self.error).strip().rpartition("\n")[2]
        if not self.error or _OWN.match(last_line):
            return False
        return bool(_COLLATERAL.search(last_line))

    @property
    def is_refusal(self) -> bool:
        """Whether the config was refused: its problems are listed, without a traceback."""
        is_told = bool(self.error) and not self.error.startswith("Traceback")
        return self.exit_code == ConfigError.exit_code and is_told

    @property
    def said(self) -> str:
        """Its exception in one line; empty when it said nothing."""
        return exception_line(self.error)

    @property
    def fault(self) -> str:
        """A mistake of the code and its place; empty for what may pass (a connection, a device)."""
        name, line = self.said.partition(":")[0], traceback_line(self.error)
        is_torchs = name == "RuntimeError" or name.startswith("torch.")
        if self.is_collateral or (is_torchs and _WORLD.search(self.said)):
            return ""
        if self.raised_by:  # in the user's own code any error counts, if its words are the same
            return f"{self.said} at {line or self.raised_by}"
        is_mistake = name in _MISTAKES and not _WORLD.search(self.said)
        return f"{name} at {line}" if is_mistake and line is not None else ""

    @property
    def raised_by(self) -> str:
        """Which part of the user's own raised it, as far as that was seen (core/errors.py)."""
        return raised_by(self.error)

    @property
    def how(self) -> str:
        if self.killed_by:
            return f"was killed by {self.killed_by}"
        return f"failed with exit code {self.exit_code}"

    @property
    def process_exit_code(self) -> int:
        """What a shell would report."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure the others followed from."""
    return by_cause(failures)[0]


def by_cause(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """The root cause first, then those that followed from it."""

    def order(failure: RankFailure) -> tuple[int, float]:
        if failure.was_ended_by_us:
            return 3, failure.at_s
        if failure.is_collateral:
            return 2, failure.at_s
        return (0 if failure.killed_by else 1), failure.at_s

    return sorted(failures, key=order)


def was_aborted(failures: Sequence[RankFailure]) -> bool:
    """By gloo, most likely, over calls that did not match; then the others know with what."""
    return bool(failures) and root_cause(failures).killed_by == signal.SIGABRT.name


def verdict(failures: Sequence[RankFailure], host: str, whole: Path | None = None) -> str:
    """What the user reads: the consequences folded, the cause last.

    `whole`: the file that has all of its traceback; then the user's own calls are enough here.
    """
    cause = root_cause(failures)
    if cause.is_refusal:  # every rank says the same of what was typed: which was first is no news
        return cause.error.rstrip()
    text = f"rank {cause.rank} (pid {cause.pid}, {host}) failed first: {_how(cause)}"
    others = sorted(failure.rank for failure in failures if failure is not cause)
    if others:
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        text += f"\n({ranks} stopped because of it)"
    if not cause.error:
        return text
    shown = cause.error.rstrip()
    short = own_calls(shown)
    if whole is not None and short != shown:
        text += f"\n(only your own calls are shown; the whole traceback: {whole})"
        shown = short
    return f"{text}\n\n{shown}"


def _how(failure: RankFailure) -> str:
    if failure.killed_by == "SIGKILL":
        return (
            "killed by SIGKILL, without a traceback; if nobody did it by hand, the system ran "
            "out of memory (see dmesg), so use a smaller micro_batch_size or fewer ranks"
        )
    if failure.killed_by:
        return f"killed by {failure.killed_by}"
    if failure.exit_code == _USAGE_ERROR and not failure.error:
        return (
            "exit code 2, without a traceback: its parser refused the command line, most likely; "
            "the launcher's own flags stand before the script's first word"
        )
    return f"exit code {failure.exit_code}"


# Why an attempt ended, from how its ranks did. Pure.


def classify(
    failures: Sequence[RankFailure],
    pages: Sequence[RankProgress | None],
    *,
    trains: bool,
    has_peers: bool,
) -> End:
    """`pages`: what the node's ranks last wrote; `has_peers`: whether there are other nodes."""
    cause = root_cause(failures)
    kind = _kind(failures, pages, has_peers=has_peers)
    code = STALE_CODE if kind is EndKind.STALE else cause.process_exit_code
    was_killed = cause.killed_by is not None
    return End(kind, last_step(pages), code, trains, by_signal=was_killed, fault=cause.fault)


def last_step(pages: Sequence[RankProgress | None]) -> int:
    """The furthest that a rank has come; 0 when none has finished a step."""
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
