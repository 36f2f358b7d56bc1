"""Diagnose: all findings about a run, the most severe first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from drivetrain.config.remedies import against_divergence
from drivetrain.diagnose import crash, divergence, experts, hang, slow
from drivetrain.diagnose.evidence import Evidence, read_evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, by_severity
from drivetrain.record.expert_load import load_records
from drivetrain.record.reading import RunReading, open_run


def diagnose(address: str | os.PathLike[str]) -> list[Finding]:
    """Return all findings of a run, local or remote; none of its processes need be alive."""
    run = open_run(address)
    evidence = [read_evidence(run, attempt) for attempt in run.attempts()]
    findings = with_recovery(evidence)
    findings += crash.failing_nodes(evidence)
    findings += slow.findings(run)
    if spike := divergence.loss_spikes(_losses(run), _calming(run)):
        findings.append(spike)
    if hot := experts.hot_expert(load_records(run.events(run.ranks[0]) if run.ranks else [])):
        findings.append(hot)
    return by_severity(findings)


_HARDWARE = (Kind.REPLICA_DRIFT, Kind.SILENT_CORRUPTION)
"""Still an error after a run has finished: its cause is there for the next run, too."""


def with_recovery(evidence: Sequence[Evidence]) -> list[Finding]:
    """Judge every attempt; what a finished run has recovered from is a warning, not an error."""
    has_finished = bool(evidence) and evidence[-1].kind == "finished"
    findings = []
    for at, each in enumerate(evidence):
        found = judge_attempt(each)
        if found is None:
            continue
        later = (other for other in evidence[at + 1 :] if _got_further(other, each))
        by = next((other.attempt for other in later), None)
        is_over = has_finished and by is not None and found.kind not in _HARDWARE
        severity = Severity.WARNING if is_over else found.severity
        findings.append(replace(found, recovered_by=by, severity=severity))
    return findings


def _got_further(later: Evidence, earlier: Evidence) -> bool:
    return later.kind == "finished" or later.step > earlier.step


def judge_attempt(evidence: Evidence) -> Finding | None:
    """Return why one attempt ended abnormally; None if it did not."""
    return divergence.judge(evidence) or hang.judge(evidence) or crash.judge(evidence)


def explain_attempt(address: str | os.PathLike[str], number: int) -> Finding | None:
    """Judge an attempt that the supervisor has just recorded."""
    run = open_run(address)
    attempt = next((each for each in run.attempts() if each.number == number), None)
    return None if attempt is None else judge_attempt(read_evidence(run, attempt))


def _calming(run: RunReading) -> list[str]:
    """Return the changes to the run's config that may prevent a loss spike."""
    said = run.config.get("optimization")
    is_clipped = isinstance(said, dict) and said.get("max_grad_norm") is not None
    source = str(run.sources.get("optimization.learning_rate", ""))
    has_own_optimizer = True if source.startswith("unused") else None
    return against_divergence(is_clipped=is_clipped, has_own_optimizer=has_own_optimizer)


def _losses(run: RunReading) -> list[tuple[int, float]]:
    """(step, loss) as logged, in order."""
    series = run.scalars().get("train/loss")
    if series is None:
        return []
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
