"""Derive findings from the reports of the rehearsed ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from drivetrain.core.errors import Problem
from drivetrain.core.text import readable_bytes
from drivetrain.data.batches import BatchPlan
from drivetrain.rehearse.calls import PAIRWISE, Line, RehearsedCall


@dataclass(frozen=True)
class Failure:
    """The error of a rank."""

    kind: str
    message: str
    line: Line | None
    is_config: bool = False
    is_together: bool = True
    """False if other ranks did not join: then the sequences of calls show the cause."""
    refused: Problem | None = None
    """Why this kind of script cannot be rehearsed at all."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    peak_line: Line | None = None
    over: tuple[str, Line | None] | None = None

    @property
    def activations(self) -> int:
        """The rest of the peak: saved for backward, gathered weights, communication buffers."""
        return max(0, self.peak - self.weights - self.gradients - self.optimizer)


@dataclass(frozen=True)
class RankReport:
    """What one rank observed."""

    rank: int
    kind: str
    calls: tuple[RehearsedCall, ...] = ()
    in_step: tuple[RehearsedCall, ...] = ()
    """The calls of the last step."""
    memory: RankMemory = field(default_factory=RankMemory)
    missing: tuple[tuple[str, Line | None], ...] = ()
    values_read: tuple[Line, ...] = ()
    failure: Failure | None = None
    seconds: float = 0.0
    process_bytes: int = 0
    notes: tuple[str, ...] = ()
    batches: BatchPlan | None = None


@dataclass(frozen=True)
class RehearsalFinding:
    """One problem that would have occurred."""

    what: str
    ranks: tuple[int, ...]
    message: str
    line: Line | None = None
    is_warning: bool = False
    """It would train, but not as intended."""

    def __str__(self) -> str:
        who = _who(self.ranks) if self.ranks else "all"
        at = f"\n    at {self.line}" if self.line is not None else ""
        return f"{'warning: ' * self.is_warning}{self.what} ({who}): {self.message}{at}"


def find(reports: Sequence[RankReport], device_memory: int | None) -> list[RehearsalFinding]:
    """Return all findings, causes before their consequences."""
    unequal = _unequal(reports)
    failures = _failures(reports, is_together=True)
    if not failures and not unequal:
        failures = _failures(reports, is_together=False)
    # a missing gradient first: ddp fails because of it one step later
    wrong = [*_missing(reports), *failures, *unequal, *_too_large(reports, device_memory)]
    return [*wrong, *_idle(reports)]


def _failures(reports: Iterable[RankReport], *, is_together: bool) -> list[RehearsalFinding]:
    by_cause: dict[Failure, list[int]] = {}
    for report in reports:
        if report.failure is not None and report.failure.is_together is is_together:
            by_cause.setdefault(report.failure, []).append(report.rank)
    return [
        RehearsalFinding(
            "config" if failure.is_config else "error",
            tuple(ranks),
            failure.message if failure.is_config else f"{failure.kind}: {failure.message}",
            failure.line,
        )
        for failure, ranks in by_cause.items()
    ]


def _missing(reports: Iterable[RankReport]) -> list[RehearsalFinding]:
    ranks: dict[tuple[str, Line | None], list[int]] = {}
    for report in reports:
        for each in report.missing:
            ranks.setdefault(each, []).append(report.rank)
    by_line: dict[Line | None, tuple[list[str], list[int]]] = {}
    for (name, line), where in ranks.items():
        names, _ = by_line.setdefault(line, ([], where))
        names.append(name)
    rule = "no gradient after backward; use it in the loss, or set requires_grad to False"
    return [
        RehearsalFinding("missing gradient", tuple(where), f"{', '.join(names)}: {rule}", line)
        for line, (names, where) in by_line.items()
    ]


def _too_large(reports: Iterable[RankReport], device_memory: int | None) -> list[RehearsalFinding]:
    if device_memory is None:
        return []
    findings = []
    for report in reports:
        memory = report.memory
        if memory.over is None:
            continue
        doing, line = memory.over
        message = (
            f"{report.kind}: {readable_bytes(memory.peak)} at the peak, but a device has "
            f"{readable_bytes(device_memory)}; the limit was passed while {doing}"
        )
        findings.append(RehearsalFinding("out of memory", (report.rank,), message, line))
    return findings


def _idle(reports: Iterable[RankReport]) -> list[RehearsalFinding]:
    """Warn of ranks that would only wait for others; the plan is the same on every rank."""
    plans = [report.batches for report in reports if report.batches is not None]
    messages = [plan.idle_warning for plan in plans[:1] if plan.idle_warning]
    return [RehearsalFinding("idle ranks", (), message, is_warning=True) for message in messages]


def _unequal(reports: Sequence[RankReport]) -> list[RehearsalFinding]:
    """Find the first call in which two ranks of one group differ."""
    findings: dict[tuple[object, ...], RehearsalFinding] = {}
    groups = {call.ranks for report in reports for call in report.calls}
    for group in sorted(groups, key=lambda ranks: (len(ranks), ranks)):
        members = [report for report in reports if report.rank in group]
        for other in members[1:]:
            found = _difference(members[0], other, group)
            if found is not None:
                findings.setdefault((found[0], found[1].line), found[1])
                break
    return list(findings.values())[:3]


def _difference(
    one: RankReport, other: RankReport, group: tuple[int, ...]
) -> tuple[str, RehearsalFinding] | None:
    pairs = zip_longest(_in_group(one, group), _in_group(other, group))
    for position, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None:
            present, absent = (other, one) if mine is None else (one, other)
            if absent.failure is not None:
                return None  # it failed before, which has its own finding
            call = mine or theirs
            message = (
                f"rank {present.rank} calls {_said(call)} as call {position + 1} of a group of "
                f"{len(group)}, but rank {absent.rank} never does: the run would hang"
            )
            return "absent", _finding(one, other, message, call.line)
        if mine.shape != theirs.shape:
            message = (
                f"call {position + 1} of a group of {len(group)} is {_said(mine)} on rank "
                f"{one.rank} and {_said(theirs)} on rank {other.rank}"
                f"{_elsewhere(mine, theirs)}: the run would hang or compute wrong results"
            )
            return "other", _finding(one, other, message, mine.line or theirs.line)
    return None


def _in_group(report: RankReport, group: tuple[int, ...]) -> list[RehearsedCall]:
    calls = report.calls
    return [call for call in calls if call.ranks == group and call.name not in PAIRWISE]


def _finding(
    one: RankReport, other: RankReport, message: str, line: Line | None
) -> RehearsalFinding:
    return RehearsalFinding("unequal collectives", (one.rank, other.rank), message, line)


def _said(call: RehearsedCall) -> str:
    return f"{call.name} of {readable_bytes(call.num_bytes)} {call.dtype}".rstrip()


def _elsewhere(mine: RehearsedCall, theirs: RehearsedCall) -> str:
    if mine.line is None or theirs.line is None or mine.line == theirs.line:
        return ""
    return f" (there at {theirs.line})"


def _who(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (" …" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
