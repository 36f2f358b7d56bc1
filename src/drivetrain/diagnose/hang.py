"""Hang: which rank do the others wait for, at which line, and what does it wait for?

Three sources, best first: the collectives each rank has called, which show the rank that is behind
or called something else; the stacks, which show where each rank is; and the ranks that have exited.
Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from drivetrain.diagnose.collectives import (
    Behind,
    Call,
    CallDifference,
    Calls,
    behind,
    first_difference,
    presumed,
)
from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Finding, Kind, Severity, listed
from drivetrain.diagnose.stacks import Frame, Stacks, Thread, main_thread

# Mismatch: ranks that called different collectives where the same one was expected. Pure.

_SAME_SHAPE = "give the tensors the same shape on every rank (pad, or agree on the size first)"
_SAME_ORDER = (
    "every rank must call the same collectives in the same order: look for an `if` on the rank or "
    "on data, or an early return, around one of them"
)


def _remedy(one: str, other: str) -> str:
    """Give the remedy for one collective with two sizes, from the lines of the two calls.

    Only calls from one line are surely the same collective. Padding two different ones would let
    the run go on and mix tensors that have nothing to do with each other.
    """
    if one and other:
        return _SAME_SHAPE if one == other else _SAME_ORDER
    return f"{_SAME_ORDER}; if there is none, {_SAME_SHAPE}"


def mismatch(evidence: Evidence, found: CallDifference) -> Finding:
    """Build the finding for ranks that called different collectives under one number."""
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
    remedy = _remedy(line, evidence.line_of(other, calls[other])) if same_op else _SAME_ORDER
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
    """Judge a rank that gloo aborted because it received more data than it asked for."""
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
    return _of_another_size(evidence, rank, thread)


def _of_another_size(evidence: Evidence, rank: int, thread: Thread) -> Finding:
    """Build the finding for an aborted rank of which only the stack is known."""
    line, others_line = evidence.line(rank), ""
    # an aborted rank loses its record: of several, it is unknown which one called it
    ended = sorted(r for r, code in evidence.exits.items() if code == -signal.SIGABRT)
    who = evidence.who(rank) if len(ended) < 2 else f"one of {listed(ended)} ({evidence.host})"
    what = f"{who} called {thread.call_of_torch_distributed or 'a collective'}"
    what += f" at {line}" if line else ""
    called = {r: calls.latest for r, calls in evidence.calls.items() if r != rank}
    other, call = next(((r, call) for r, call in called.items() if call), (rank, None))
    if call is None:
        what += " with tensors of another size than the other ranks'"
    else:
        others_line = evidence.line_of(other, call)
        what += f" where {evidence.who(other)} called {_called(evidence, other, call)}"
        what += ": the sizes of their tensors differ"
    return Finding(
        Severity.ERROR,
        Kind.MISMATCH,
        what,
        _remedy(line, others_line),
        ("gloo aborts a process that receives more data than it asked for",),
        tuple(ended) or (rank,),
        evidence.host_of(rank),
        line,
        evidence.attempt,
        evidence.step,
    )


def crossed(evidence: Evidence, here: Behind, there: Behind) -> Finding:
    """Build the finding for ranks that wait for each other in different groups."""
    first, second = here.waiting[0], there.waiting[0]
    what = (
        f"{evidence.who(first)} waits in the {_called(evidence, first, here.call)} of "
        f"{here.call.group} and {evidence.who(second)} in the "
        f"{_called(evidence, second, there.call)} of {there.call.group}: each waits for the other"
    )
    line = evidence.line_of(first, here.call)
    ranks = tuple(sorted({first, second}))
    host, attempt, step = evidence.host_of(first), evidence.attempt, evidence.step
    return Finding(
        Severity.ERROR, Kind.MISMATCH, what, _SAME_ORDER, (), ranks, host, line, attempt, step
    )


def _called(evidence: Evidence, rank: int, call: Call) -> str:
    line = evidence.line_of(rank, call)
    return f"{call} at {line}" if line else str(call)


_LOADER = "torch/utils/data/dataloader.py"
_FETCH = "torch/utils/data/_utils/fetch.py"


def judge(evidence: Evidence) -> Finding | None:
    """Return why an attempt stalled; None if it did not."""
    if evidence.kind != "stalled":
        return None
    left = [rank for rank, code in evidence.exits.items() if code == 0]
    if left:
        return left_early(evidence, left)
    difference = first_difference(evidence.calls)
    if difference is not None:
        return mismatch(evidence, difference)
    return _waiting(evidence) or _by_stacks(evidence)


def _waiting(evidence: Evidence) -> Finding | None:
    """Find ranks that wait in a collective that others have not reached."""
    waits = [each for each in behind(evidence.calls) if each.missing]
    for each in waits:
        own_fault = [rank for rank in each.missing if evidence.calls[rank].pending is None]
        if own_fault:
            return _never_came(evidence, own_fault, each)
    if len(waits) > 1:
        return crossed(evidence, waits[0], waits[1])
    return None


def left_early(evidence: Evidence, left: Sequence[int]) -> Finding:
    """Build the finding for ranks that exited with code 0 while others wait for them."""
    first = left[0]
    others = [rank for rank in {*evidence.stacks, *evidence.calls} if rank not in left]
    line = evidence.line(others[0]) if others else ""
    waits = f", and {evidence.who(others[0])} waits for it at {line}" if others and line else ""
    return Finding(
        Severity.ERROR,
        Kind.LEFT_EARLY,
        f"{evidence.who(first)} ended with exit code 0 after step {evidence.step} while the others "
        f"were still training{waits}",
        "make every rank take the same number of steps: look for an exit, a break or a return on "
        "one rank, or data that ends earlier there",
        (f"exit code 0: {listed(left)}",),
        tuple(left),
        evidence.host_of(first),
        line,
        evidence.attempt,
        evidence.step,
    )


def _never_came(evidence: Evidence, missing: Sequence[int], wait: Behind) -> Finding:
    culprit = missing[0]
    waiting = listed([rank for rank in wait.waiting if rank not in missing] or wait.waiting)
    return _stuck(
        evidence,
        tuple(missing),
        f"{evidence.who(culprit)} never reached the {wait.call.with_line} that {waiting} "
        f"{'wait' if waiting.startswith('ranks') else 'waits'} in",
    )


_NO_STACKS = (
    "no rank's stacks were recorded: look at what that host printed last, and at whether it can "
    "write to the run directory"
)


def _by_stacks(evidence: Evidence) -> Finding:
    """Without a difference in collectives, blame the ranks whose stack is not in one."""
    silent = [rank for rank, stacks in evidence.stacks.items() if stacks is None]
    if silent:
        return _no_answer(evidence, silent)
    own = [
        rank
        for rank, stacks in evidence.stacks.items()
        if stacks is not None and stacks.main is not None and not stacks.main.is_in_collective
    ]
    if evidence.stacks and not own:
        return _all_wait(evidence)
    ranks = tuple(own)
    if not ranks:
        what = f"{evidence.host}: {evidence.end.get('detail', 'no progress')}"
        return _finding(evidence, what, (), "", (), _NO_STACKS)
    return _stuck(evidence, ranks, f"{evidence.who(ranks[0])} made no progress")


def _all_wait(evidence: Evidence) -> Finding:
    """Every rank is in a call of torch.distributed, and the calls do not match."""
    places: dict[str, list[int]] = {}
    for rank, stacks in evidence.stacks.items():
        call = stacks.main.call_of_torch_distributed if stacks and stacks.main else ""
        places.setdefault(f"{call or 'a collective'} at {evidence.line(rank)}", []).append(rank)
    where = ", ".join(f"{listed(ranks)} in {place}" for place, ranks in places.items())
    ranks = tuple(evidence.stacks)
    grounds = [text for those in places.values() for text in _innermost(evidence, those[0])]
    return _finding(
        evidence,
        f"every rank waits for another: {where}",
        ranks,
        evidence.line(ranks[0]),
        grounds,
        "pair every send with a recv that is called at the same time (one side receives first, or "
        "batch_isend_irecv), and call the same collectives in the same order on every rank of a "
        "group",
    )


def _stuck(evidence: Evidence, ranks: tuple[int, ...], what: str) -> Finding:
    """Build the finding for a rank that is stuck outside the expected collective."""
    stacks = evidence.stacks.get(ranks[0])
    if stacks is None and ranks[0] in evidence.stacks:
        return _no_answer(evidence, ranks)
    main = stacks.main if stacks is not None else None
    reads_data = main is not None and main.is_in(_LOADER)
    waits_for_workers = reads_data and main is not None and not main.is_in(_FETCH)
    worker = _stuck_worker(stacks) if waits_for_workers and stacks else None
    line = evidence.line(ranks[0])
    if worker is not None:
        pid, frame = worker
        what += f": it waits for its data worker (process {pid}), which is at {frame}"
        line = str(frame)
    elif waits_for_workers:
        what += ": it waits for its data loader's workers"
    elif line:
        what += f": it is at {line}"
    remedy = (
        "look at what the dataset waits for there: a file, a lock, a network read without a timeout"
        if reads_data
        else "look at what that line waits for; a rank that may skip work must not skip collectives"
    )
    return _finding(evidence, what, ranks, line, _innermost(evidence, ranks[0]), remedy)


def _no_answer(evidence: Evidence, silent: Sequence[int]) -> Finding:
    what = (
        f"{evidence.who(silent[0])} does not answer: its process is stopped (SIGSTOP, a debugger) "
        "or blocked in the kernel"
    )
    return _finding(
        evidence,
        what,
        tuple(silent),
        "",
        (f"no stacks from {listed(silent)}",),
        "look at the process state (ps -o pid,stat,wchan) and at the host's storage and devices",
    )


def _finding(
    evidence: Evidence,
    what: str,
    ranks: tuple[int, ...],
    line: str,
    grounds: Sequence[str],
    remedy: str,
) -> Finding:
    host = evidence.host_of(ranks[0]) if ranks else evidence.host
    detail = str(evidence.end.get("detail", ""))
    return Finding(
        Severity.ERROR,
        Kind.HANG,
        what,
        remedy,
        tuple(text for text in (detail, *grounds) if text),
        ranks,
        host,
        line,
        evidence.attempt,
        evidence.step,
    )


def _stuck_worker(stacks: Stacks) -> tuple[int, Frame] | None:
    """Return the data worker that is in the user's code, with its process id."""
    for pid, threads in stacks.children:
        thread = main_thread(threads)
        if thread is not None and thread.user_frame is not None and not _is_idle_worker(thread):
            return pid, thread.user_frame
    return None


def _is_idle_worker(thread: Thread) -> bool:
    """Whether a data worker waits for work: it is in its loop, but not fetching."""
    return thread.is_in("torch/utils/data/_utils/worker.py") and not thread.is_in(_FETCH)


def _innermost(evidence: Evidence, rank: int) -> tuple[str, ...]:
    stacks = evidence.stacks.get(rank)
    thread = stacks.main if stacks is not None else None
    return tuple(f"rank {rank}: {frame}" for frame in thread.shown[:4]) if thread else ()
