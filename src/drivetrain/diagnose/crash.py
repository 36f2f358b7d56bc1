"""Crash: which rank failed first, where, and whether memory was the cause. Pure."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.core.errors import exception_line
from drivetrain.core.text import readable_bytes
from drivetrain.core.traits import remedy_for
from drivetrain.diagnose import hang
from drivetrain.diagnose.collectives import first_difference
from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, listed
from drivetrain.diagnose.hang import aborted, mismatch
from drivetrain.diagnose.stacks import traceback_line

_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|"
    r"bad_alloc|std::bad_alloc",
)
_WHILE_STARTING = ("failed while starting", "failed before its first step")
"""Earlier releases wrote the second one."""
_FAILED = ("failed", *_WHILE_STARTING, "another node's failure")
_AGAIN = 3


def judge(evidence: Evidence) -> Finding | None:
    """Return why an attempt failed; None if it did not."""
    failures = evidence.end.get("failures", [])
    if evidence.kind not in _FAILED or not failures:
        return None
    cause = failures[0]
    if cause.get("is_collateral"):
        return _noticed_by_others(evidence, cause)
    if _is_memory(evidence, cause):
        return _out_of_memory(evidence, cause, failures)
    if int(cause["exit_code"]) == -signal.SIGABRT:
        return aborted(evidence, int(cause["rank"])) or _crash(evidence, cause, failures)
    return _crash(evidence, cause, failures)


def _noticed_by_others(evidence: Evidence, cause: Mapping[str, Any]) -> Finding:
    """No rank failed by itself: one exited early, or two called different collectives."""
    left = [rank for rank, code in evidence.exits.items() if code == 0]
    if left:
        waiting = traceback_line(str(cause.get("error", "")))
        found = hang.left_early(evidence, left)
        if waiting is None:
            return found
        told = f"{evidence.who(cause['rank'])} was waiting for it at {waiting}"
        changes = {"line": str(waiting), "evidence": (*found.evidence, told)}
        return Finding(**{**found.__dict__, **changes})
    difference = first_difference(evidence.calls)
    if difference is not None:
        return mismatch(evidence, difference)
    return _crash(evidence, cause, evidence.end["failures"])


def _crash(
    evidence: Evidence, cause: Mapping[str, Any], failures: Sequence[Mapping[str, Any]]
) -> Finding:
    rank, error = int(cause["rank"]), str(cause.get("error", ""))
    said = exception_line(error)
    line = traceback_line(error)
    where = f" at {line}" if line else ""
    what = f"{evidence.who(rank)} failed first, {_when(evidence)}{where}: "
    what += said or _how(int(cause["exit_code"]))
    return Finding(
        Severity.ERROR,
        Kind.CRASH,
        what,
        _crash_remedy(evidence, cause),
        _followed(failures),
        (rank,),
        evidence.host_of(rank),
        str(line) if line else "",
        evidence.attempt,
        evidence.step,
    )


def _is_memory(evidence: Evidence, cause: Mapping[str, Any]) -> bool:
    if _MEMORY.search(exception_line(str(cause.get("error", "")))):
        return True
    was_killed = int(cause["exit_code"]) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    memory = _memory_of(evidence, cause)
    struck = memory.get("oom_kills") or memory.get("host_oom_kills")
    return was_killed and (bool(struck) or _is_nearly_full(memory))


def _memory_of(evidence: Evidence, cause: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = evidence.end.get("resources", {}).get(str(cause["rank"]), {})
    return found


def _is_nearly_full(memory: Mapping[str, Any]) -> bool:
    limit, held = memory.get("limit_bytes"), memory.get("held_bytes")
    return bool(limit and held and held > 0.9 * limit)


def _out_of_memory(
    evidence: Evidence, cause: Mapping[str, Any], failures: Sequence[Mapping[str, Any]]
) -> Finding:
    rank, error = int(cause["rank"]), str(cause.get("error", ""))
    memory, line = _memory_of(evidence, cause), traceback_line(error)
    held, limit = memory.get("held_bytes"), memory.get("limit_bytes")
    holds = f", holding {readable_bytes(held)}" if held else ""
    if held and limit and (error or memory.get("oom_kills") or _is_nearly_full(memory)):
        holds += f" of its limit of {readable_bytes(limit)}"
    elif held:  # it has grown since, or was moved to a control group with a lower limit
        holds += " when last seen"
    how = "was killed because memory ran out" if not error else "ran out of memory"
    everyone = {
        int(r): m["held_bytes"]
        for r, m in evidence.end.get("resources", {}).items()
        if m.get("held_bytes")
    }
    most = sorted(everyone.items(), key=lambda item: -item[1])[:8]
    return Finding(
        Severity.ERROR,
        Kind.OUT_OF_MEMORY,
        f"{evidence.who(rank)} {how}{holds}, {_when(evidence)}{f' at {line}' if line else ''}",
        _memory_remedy(rank, everyone, is_starting=not evidence.start),
        (
            *(f"rank {r} held {readable_bytes(n)}" for r, n in most),
            *([exception_line(error)[:300]] if error else []),
            *([f"traceback: {evidence.traceback_file(rank)}"] if error else []),
            *_followed(failures),
        ),
        (rank,),
        evidence.host_of(rank),
        str(line) if line else "",
        evidence.attempt,
        evidence.step,
    )


def _memory_remedy(rank: int, held: Mapping[int, int], *, is_starting: bool) -> str:
    if is_starting:
        return "load less in each rank, run fewer ranks per node, or give the job more memory"
    others = [number for r, number in held.items() if r != rank]
    if others and held.get(rank, 0) > 1.5 * max(others):
        return (
            f"rank {rank} holds more than its peers: look for what only this rank keeps (a growing "
            "list, logging, a cache); otherwise lower micro_batch_size"
        )
    return (
        "lower micro_batch_size (the global batch size stays the same), set "
        f"memory.activation_checkpointing, use {remedy_for('memory')}, or run fewer ranks per node"
    )


def failing_nodes(all_evidence: Sequence[Evidence]) -> list[Finding]:
    """Find hosts whose ranks are repeatedly the first to fail while other hosts' are not."""
    firsts = [
        evidence.host_of(int(evidence.end["failures"][0]["rank"]))
        for evidence in all_evidence
        if evidence.kind in _FAILED
        and evidence.end.get("failures")
        and not evidence.end["failures"][0].get("is_collateral")
    ]
    hosts = {host for e in all_evidence for host in (*e.end.get("hosts", {}).values(), e.host)}
    findings = []
    for host, count in Counter(firsts).most_common():
        if count >= _AGAIN and len(hosts - {""}) > 1 and count > 0.6 * len(firsts):
            findings.append(
                Finding(
                    Severity.ERROR,
                    Kind.FAILING_NODE,
                    f"host {host} failed first in {count} of {len(firsts)} failed attempts",
                    f"exclude {host} from the run and have it checked",
                    tuple(f"attempt {e.attempt}: {e.kind}" for e in all_evidence)[:8],
                    host=host,
                )
            )
    return findings


def _followed(failures: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    others = sorted(int(failure["rank"]) for failure in failures[1:])
    return (f"{listed(others)} stopped because of it",) if others else ()


def _when(evidence: Evidence) -> str:
    if not evidence.step:
        return "before its first step"
    has_resumed = evidence.kind in _WHILE_STARTING
    return f"after {'resuming from ' if has_resumed else ''}step {evidence.step}"


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}, without a traceback"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _crash_remedy(evidence: Evidence, cause: Mapping[str, Any]) -> str:
    exit_code = int(cause["exit_code"])
    if exit_code == -signal.SIGKILL:
        return "if nobody killed it, check dmesg: the kernel kills processes when memory runs out"
    if exit_code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        return "native code crashed: rerun with PYTHONFAULTHANDLER=1 to see the Python stack"
    if not cause.get("error"):
        return "the script exited by itself (sys.exit, os._exit): look for the call"
    file = evidence.traceback_file(int(cause["rank"]))
    return f"read that rank's whole traceback: {file} in the run's directory"
