"""Mismatch: ranks that called different collectives where the same one was due. Pure."""

from __future__ import annotations

import signal

from drivetrain.diagnose.collectives import (
    Behind,
    Call,
    Calls,
    Difference,
    first_difference,
    presumed,
)
from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, listed

_SAME_SHAPE = "give the tensors the same shape on every rank (pad, or agree on the size first)"
_SAME_ORDER = (
    "every rank must call the same collectives in the same order: look for an `if` on the rank or "
    "on data, or a return, around one of them"
)


def mismatch(evidence: Evidence, found: Difference) -> Finding:
    """Ranks called different collectives under one number."""
    calls = dict(sorted(found.calls.items()))
    suspects = found.odd or tuple(calls)
    first = suspects[0]
    other = next((rank for rank in calls if rank not in suspects), None)
    if other is None:
        other = next(r for r in calls if calls[r].signature != calls[first].signature)
    same_op = calls[first].op == calls[other].op
    line = evidence.line_of(first, calls[first])
    what = (
        f"{evidence.who(first)} called {_called(evidence, first, calls[first])} where "
        f"{evidence.who(other)} called {_called(evidence, other, calls[other])}"
    )
    remedy = (
        _SAME_SHAPE
        if same_op and calls[first].user_frame == calls[other].user_frame
        else _SAME_ORDER
    )
    return Finding(
        Severity.ERROR,
        Kind.MISMATCH,
        what,
        remedy,
        tuple(
            f"collective {found.number} of {found.group}: rank {rank} {call}"
            f"{f' at {call.user_frame}' if call.user_frame else ''}"
            for rank, call in list(calls.items())[:8]
        ),
        suspects if len(suspects) < len(calls) else tuple(calls),
        evidence.host_of(first),
        line,
        evidence.attempt,
        evidence.step,
    )


def aborted(evidence: Evidence, rank: int) -> Finding | None:
    """A rank that gloo ended: it was sent more than it asked for, so two calls did not match."""
    stacks = evidence.stacks.get(rank)
    thread = stacks.main if stacks is not None else None
    if thread is None or not thread.is_in_collective:
        return None
    others = {r: calls for r, calls in evidence.calls.items() if r != rank}
    own = presumed(others, thread.frames)
    everyone = dict(others)
    if own is not None:
        groups = next(c.groups for c in others.values() if own.group in c.groups)
        everyone[rank] = Calls((own,), groups)
    difference = first_difference(everyone)
    if difference is not None:
        return mismatch(evidence, difference)
    pending = next((calls.latest for calls in others.values() if calls.latest), None)
    line = evidence.line(rank)
    than = f" than the {pending} that {listed(list(others))} called" if pending else ""
    # one that is ended takes what it called with it: of several nobody can tell which it was
    ended = sorted(r for r, code in evidence.exits.items() if code == -signal.SIGABRT)
    who = evidence.who(rank) if len(ended) < 2 else f"one of {listed(ended)} ({evidence.host})"
    return Finding(
        Severity.ERROR,
        Kind.MISMATCH,
        f"{who} called a collective of another size{than}, at {line}",
        _SAME_SHAPE,
        ("gloo aborts a process that is sent more than it has asked for",),
        tuple(ended) or (rank,),
        evidence.host_of(rank),
        line,
        evidence.attempt,
        evidence.step,
    )


def crossed(evidence: Evidence, here: Behind, there: Behind) -> Finding:
    """Ranks wait for each other, in different groups."""
    first, second = here.waiting[0], there.waiting[0]
    what = (
        f"{evidence.who(first)} waits in the {here.call.with_line} of {here.call.group} and "
        f"{evidence.who(second)} in the {there.call.with_line} of {there.call.group}: each waits "
        "for the other"
    )
    line = evidence.line_of(first, here.call)
    remedy = "let every rank use its groups in the same order"
    ranks = tuple(sorted({first, second}))
    host, attempt, step = evidence.host_of(first), evidence.attempt, evidence.step
    return Finding(
        Severity.ERROR, Kind.MISMATCH, what, remedy, (), ranks, host, line, attempt, step
    )


def _called(evidence: Evidence, rank: int, call: Call) -> str:
    line = evidence.line_of(rank, call)
    return f"{call} at {line}" if line else str(call)
