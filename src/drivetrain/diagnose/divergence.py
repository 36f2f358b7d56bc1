"""Divergence: non-finite values, loss spikes and replicas that drift apart. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, listed
from drivetrain.diagnose.stacks import Frame, innermost_users

_DRIFT = re.compile(
    r"^.*(?:ReplicaDrift|SilentCorruption): "
    r"(?P<by>sentinel|replay): (?P<said>(?:after|at) step (?P<step>\d+) .*)$",
    re.MULTILINE,
)
_ODD = re.compile(r"ranks? (?P<ranks>[\d, ]+?) (?:differ|did not compute)")
_COMPARED = {
    "sentinel": (Kind.REPLICA_DRIFT, "the sentinel compares the raw bits of all copies"),
    "replay": (Kind.SILENT_CORRUPTION, "a micro-batch was computed twice and compared bit for bit"),
}
_NOT_A_NUMBER = re.compile(
    r"(?P<said>train/loss = \S+ at step (?P<step>\d+))(?: on rank (?P<rank>\d+))?"
    r"(?:[^;\n]*; (?P<remedy>[^\n]+))?"
)
_REMEDY = (
    "look for values in the data that are not finite, and for a division, a log or a sqrt in the "
    "model and the loss function"
)
"""For records without a remedy: earlier releases did not write one."""
_WINDOW = 50
_ENOUGH = 20


def judge(evidence: Evidence) -> Finding | None:
    """Find non-finite values or replica drift in one attempt."""
    return _non_finite(evidence) or _drift(evidence)


def _non_finite(evidence: Evidence) -> Finding | None:
    reports = evidence.non_finite
    if not reports:
        return _only_seen_in_the_loss(evidence)
    # the earliest step; within it, prefer a rank that saw it in its input or a module: a rank that
    # saw it in its parameters may have received it from the others
    rank = min(
        reports, key=lambda r: (reports[r]["step"], reports[r]["found_in"] == "parameter", r)
    )
    report = reports[rank]
    frame = innermost_users(Frame(*each) for each in report.get("frames", []))
    line = str(frame) if frame else ""
    ids = [int(i) for i in report.get("sample_ids", [])]
    found_on = sorted(r for r in reports if reports[r]["step"] == report["step"])
    where = f" (first seen at {line})" if line else ""
    return Finding(
        Severity.ERROR,
        Kind.NON_FINITE,
        f"{evidence.who(rank)}: {report['what']} was not finite at step {report['step']}{where}",
        str(report.get("remedy") or _REMEDY),
        (
            f"{_place(report)}: {report['num_nan']} nan, {report['num_inf']} inf of "
            f"{report['num_elements']} values",
            *([f"sample ids: {_shown(ids)}"] if ids else []),
            *([f"not finite at this step on {listed(found_on)}"] if len(found_on) > 1 else []),
        ),
        (rank,),
        evidence.host_of(rank),
        line,
        evidence.attempt,
        int(report["step"]),
    )


def _place(report: Mapping[str, Any]) -> str:
    """`module blocks.1`, `input batch[0]`; of the loss its name alone, which says loss itself."""
    is_loss = report["found_in"] == "loss"
    return str(report["name"]) if is_loss else f"{report['found_in']} {report['name']}"


def _only_seen_in_the_loss(evidence: Evidence) -> Finding | None:
    errors = [str(failure.get("error", "")) for failure in evidence.end.get("failures", [])]
    seen = [found for error in errors if (found := _NOT_A_NUMBER.search(error))]
    if not seen:
        return None
    first = seen[0]
    # without a rank, it is the mean over all of them
    ranks = sorted(int(f["rank"]) for f in seen if f["rank"] and f["step"] == first["step"])
    return Finding(
        Severity.ERROR,
        Kind.NON_FINITE,
        f"the loss became NaN or infinite at step {first['step']}"
        + (f" on {listed(ranks)}" if ranks else ""),
        first["remedy"] or _REMEDY,
        (first["said"],),
        tuple(ranks),
        attempt=evidence.attempt,
        step=int(first["step"]),
    )


def _drift(evidence: Evidence) -> Finding | None:
    for failure in evidence.end.get("failures", []):
        found = _DRIFT.search(str(failure.get("error", "")))
        if found:
            odd = _ODD.search(found["said"])
            ranks = tuple(int(r) for r in odd["ranks"].split(",")) if odd else ()
            what, _, remedy = found["said"].partition("; ")
            kind, why = _COMPARED[found["by"]]
            return Finding(
                Severity.ERROR,
                kind,
                what,
                remedy,
                (why,),
                ranks,
                evidence.host_of(ranks[0]) if ranks else "",
                attempt=evidence.attempt,
                step=int(found["step"]),
            )
    return None


def loss_spikes(losses: Sequence[tuple[int, float]], changes: Sequence[str]) -> Finding | None:
    """Return the worst loss spike relative to the run's recent losses; `changes` may prevent it.

    A spike is measured in the spread of the fifty losses before it (median absolute deviation),
    and must also be 1.5 times their median, so that a noisy loss alone is not a finding.
    """
    worst: tuple[float, int, float, float] | None = None
    for at in range(_ENOUGH, len(losses)):
        before = [value for _, value in losses[max(0, at - _WINDOW) : at]]
        step, value = losses[at]
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(b - middle) for b in before)
        times = (value - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
        if times > 10 and value > 1.5 * middle and (worst is None or times > worst[0]):
            worst = (times, step, value, middle)
    if worst is None:
        return None
    times, step, value, middle = worst
    return Finding(
        Severity.WARNING,
        Kind.LOSS_SPIKE,
        f"the loss rose to {value:.4g} at step {step}, from about {middle:.4g} before it",
        f"{' or '.join([*changes, 'warm up longer'])}; the step number determines which samples "
        "that step used",
        (f"{times:.0f} times the usual spread of the {_WINDOW} losses before it",),
        step=step,
    )


def _shown(ids: Sequence[int], most: int = 16) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more
