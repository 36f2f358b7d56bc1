"""Run a learner's file on real ranks: what it returned and sent, or why it failed."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from drivetrain.core.errors import WorkerFailure
from drivetrain.core.text import readable_bytes
from drivetrain.learn.flow import Flow, RankLog, RankRecord, RecordedCall, read_record
from drivetrain.testing import run_ranks

_TIMEOUT_S = 45.0
_BUSY_S = 30.0
"""A rank that runs longer writes its stack; by then every message has timed out."""

_IMPORTS_S = 300.0
"""For the imports that all ranks share; on a busy machine that is most of the first check."""

_LEFT_ALONE = ("Connection closed", "Connection reset", "Broken pipe")
"""Errors of gloo on ranks whose peer has exited: a consequence, never the cause."""


class Shortcoming(Exception):
    """What is wrong with a learner's file, worded for learners; `hint` names the matching hint."""

    def __init__(
        self, hint: str, expected: str, found: str, *, where: str = "", picture: str = ""
    ) -> None:
        super().__init__(found)
        self.hint = hint
        self.expected = expected
        self.found = found
        self.where = where
        self.picture = picture


@dataclass(frozen=True)
class Outcome:
    """What the ranks returned and sent."""

    results: list[Any]
    records: list[RankRecord]
    ended_by: int = 0
    """The signal that ended a rank, if the check intends that."""
    busy_lines: dict[int, int] = field(default_factory=dict)
    """By rank, the learner's line at which a rank was that did not end."""

    def flow(self, section: str = "") -> Flow:
        return Flow(
            tuple(record.sections.get(section, RankLog(record.rank)) for record in self.records)
        )

    @property
    def sections(self) -> list[str]:
        return [name for name in self.records[0].sections if name]


def run_on_ranks(
    file: Path, scenario: Callable[..., Any], num_ranks: int, args: Sequence[Any] = ()
) -> Outcome:
    """Run `scenario(learner's module, recorder, *args)` on every rank; Shortcoming if one fails."""
    outcome, failure = _run(file, scenario, num_ranks, args)
    if failure:
        raise _why(outcome, file, failure)
    _refuse_careless(outcome, file)
    return outcome


def run_until_killed(
    file: Path,
    scenario: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any] = (),
    signals: Collection[int] = (signal.SIGKILL,),
) -> Outcome:
    """Like `run_on_ranks`, for a scenario in which one of these signals may end a rank."""
    outcome, failure = _run(file, scenario, num_ranks, args)
    ended = re.search(r"ended by signal (\d+)", failure)
    if failure and (ended is None or int(ended[1]) not in signals):
        raise _why(outcome, file, failure)
    return replace(outcome, ended_by=int(ended[1]) if ended else 0)


def _run(
    file: Path, scenario: Callable[..., Any], num_ranks: int, args: Sequence[Any]
) -> tuple[Outcome, str]:
    """Return what the ranks recorded, and the failure."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-learn-") as folder:
        logs = [Path(folder) / f"{rank}.jsonl" for rank in range(num_ranks)]
        failure = ""
        results: list[Any] = []
        import_once()
        try:
            results = run_ranks(
                _on_rank, num_ranks, _TIMEOUT_S, args=(str(file), folder, scenario, tuple(args))
            )
        except WorkerFailure as error:
            failure = str(error)
        outcome = Outcome(
            results,
            [read_record(log, rank) for rank, log in enumerate(logs)],
            busy_lines=_busy_lines(Path(folder), file),
        )
    if "still running" in failure and not all(record.has_begun for record in outcome.records):
        raise WorkerFailure(f"{failure}, before they reached {file.name}; is the machine busy?")
    return outcome, failure


def _busy_lines(folder: Path, file: Path) -> dict[int, int]:
    """Return each rank's line from its stack, which begins with the innermost call."""
    at_line = re.compile(f'File "{re.escape(str(file))}", line (\\d+)')
    found = {int(stack.stem): at_line.search(stack.read_text()) for stack in folder.glob("*.stack")}
    return {rank: int(line[1]) for rank, line in sorted(found.items()) if line}


@cache
def import_once() -> None:
    """Import first, so that the time limit applies only to the learner's code."""
    run_ranks(_nothing, 1, _IMPORTS_S)


def _nothing() -> None:
    pass


def load(file: Path) -> ModuleType:
    """Import the learner's file anew."""
    spec = importlib.util.spec_from_file_location(f"learner_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_this_process(file: Path, function: Callable[[ModuleType], Any]) -> Any:
    """Call `function` without ranks; a mistake is reported like one on a rank."""
    try:
        return function(load(file))
    except Shortcoming:
        raise
    except Exception as error:
        name = type(error).__name__
        line = line_in(error, file)
        raise as_shortcoming(name, str(error), file, line, "this process") from error


def as_shortcoming(kind: str, text: str, file: Path, line: int, where: str) -> Shortcoming:
    """Return the Shortcoming for an exception of the learner's code; `kind` is its class name."""
    if kind == "NotImplementedError":
        return _todo(text, file, line)
    return _crash(kind, text, file, line, where)


def _on_rank(file: str, folder: str, scenario: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from drivetrain.learn.recording import Recorder

    # What gloo and torch print when a rank dies is explained by the check, from the ranks' logs.
    quiet = os.open(Path(folder) / f"{dist.get_rank()}.stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 2)
    recorder = Recorder(Path(folder) / f"{dist.get_rank()}.jsonl", Path(file))
    recorder.install()
    stack = (Path(folder) / f"{dist.get_rank()}.stack").open("w")
    faulthandler.dump_traceback_later(_BUSY_S, file=stack)
    try:
        module = load(Path(file))
        result = scenario(module, recorder, *args)
    except BaseException as error:
        recorder.error(error, line_in(error, Path(file)))
        raise
    faulthandler.cancel_dump_traceback_later()
    recorder.stop()
    _wait_for_others(Path(folder))
    return result


def _wait_for_others(folder: Path) -> None:
    """Use files: our messages could be received by the learner's code."""
    (folder / f"{dist.get_rank()}.done").touch()
    deadline_s = time.monotonic() + _TIMEOUT_S
    while len(list(folder.glob("*.done"))) < dist.get_world_size():
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.005)


def line_in(error: BaseException, file: Path) -> int:
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    lines = [
        frame.lineno or 0
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    return lines[-1] if lines else 0


def _why(outcome: Outcome, file: Path, failure: str) -> Exception:
    """Return the first cause among all that the ranks recorded."""
    errors = {record.rank: record.error for record in outcome.records if record.error}
    for error in errors.values():
        if error["error"] == "NotImplementedError":
            return _todo(error["text"], file, error["line"])
    for name in ["", *outcome.sections]:
        mismatch = _size_mismatch(outcome.flow(name), file, name)
        if mismatch is not None:
            return mismatch
    mismatch = _collective_mismatch(outcome, file)
    if mismatch is not None:
        return mismatch
    for rank, error in errors.items():
        if error["error"] != "Stuck" and not any(each in error["text"] for each in _LEFT_ALONE):
            told = _crash(error["error"], error["text"], file, error["line"], f"rank {rank}")
            told.where = _case(outcome, list(outcome.records[rank].sections)[-1])
            return told
    if errors or "still running" in failure:
        return _deadlock(outcome, file)
    return Shortcoming("crash", "every rank exits normally", failure.splitlines()[0])


def _todo(text: str, file: Path, line: int) -> Shortcoming:
    where = f"{file.name}:{line}" if line else file.name
    found = f"still to be written: {text or 'a TODO'} ({where})"
    return Shortcoming("todo", "every TODO replaced by code", found)


def _crash(kind: str, text: str, file: Path, line: int, where: str) -> Shortcoming:
    gone = re.fullmatch(rf"module 'learner_{re.escape(file.stem)}' has no attribute '(\w+)'", text)
    if gone:
        expected = f"a function {gone[1]}, as in the template"
        return Shortcoming("renamed", expected, f"{file.name} has no function {gone[1]}")
    at = f"{file.name}:{line}: {_source_line(file, line)}" if line else file.name
    found = f"{where} raised {kind}: {text.strip() or 'without a message'}\n{at}"
    if kind in ("SyntaxError", "IndentationError", "TabError"):
        return Shortcoming("syntax", "a file that Python can parse", found)
    return Shortcoming("crash", "the code runs to its end", found)


def _source_line(file: Path, line: int) -> str:
    lines = file.read_text().splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _last_section(outcome: Outcome) -> str:
    """Return the section that was running when the ranks stopped."""
    sections = [list(record.sections)[-1] for record in outcome.records]
    order = ["", *max((list(r.sections) for r in outcome.records), key=len)]
    return min(sections, key=order.index)


def num_ranks_in_words(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _case(outcome: Outcome, section: str) -> str:
    """Return the case being run, or nothing if the file was only being imported."""
    return f"{num_ranks_in_words(len(outcome.records))}, {section}" if section else ""


def _deadlock(outcome: Outcome, file: Path) -> Shortcoming:
    name = _last_section(outcome)
    flow = outcome.flow(name)
    waiting = flow.waiting()
    if not waiting:
        return Shortcoming(
            "endless",
            "the code finishes within seconds",
            _still_computing(outcome, file),
            where=_case(outcome, name),
        )
    finished = [
        f"rank {log.rank} does not wait: it has finished its exchange"
        for log in flow.logs
        if not log.pending
    ]
    kinds = {call.kind for log in flow.logs for call in log.pending}
    return Shortcoming(
        "deadlock",
        "every message that a rank waits for is sent, and every message sent is received"
        if kinds & {"send", "recv"}
        else "every rank calls each collective: it completes when the last rank has called it",
        "\n".join(waiting + finished),
        where=_case(outcome, name) or num_ranks_in_words(flow.num_ranks),
        picture=flow.picture(),
    )


def _still_computing(outcome: Outcome, file: Path) -> str:
    if not outcome.busy_lines:
        return f"{file.name} was still computing"
    rank, line = next(iter(outcome.busy_lines.items()))
    return f"rank {rank} was still computing\n{file.name}:{line}: {_source_line(file, line)}"


def _size_mismatch(flow: Flow, file: Path, name: str) -> Shortcoming | None:
    found = flow.mismatched()
    if not found:
        return None
    source, target, send, receive = found[0]
    is_type = send.elements.split()[:1] == receive.elements.split()[:1] != []
    return Shortcoming(
        "type-mismatch" if is_type else "size-mismatch",
        f"rank {target} receives as many bytes as rank {source} sends",
        f"rank {source} sent {_amount(send)}, {file.name}:{send.line}\n"
        f"rank {target} has a buffer of {_amount(receive)}, {file.name}:{receive.line}",
        where=name,
    )


def _amount(call: RecordedCall) -> str:
    elements = f" ({call.elements})" if call.elements else ""
    return readable_bytes(call.num_bytes) + elements


def _collective_mismatch(outcome: Outcome, file: Path) -> Shortcoming | None:
    """Find the first collective that differs among the ranks of its group that reached it."""
    for name in ["", *outcome.sections]:
        logs = outcome.flow(name).logs
        for ranks in {call.ranks: 0 for log in logs for call in log.collectives}:
            members = [log for log in logs if not ranks or log.rank in ranks]
            in_group = [[c for c in log.collectives if c.ranks == ranks] for log in members]
            for calls in zip(*in_group, strict=False):
                if len({_must_agree(call) for call in calls}) > 1:
                    return _told_mismatch(members, calls, file, name)
    return None


def _must_agree(call: RecordedCall) -> tuple[str, int]:
    """In an all-to-all, sizes may differ between ranks."""
    return call.kind, 0 if call.kind.startswith("all_to_all") else call.num_bytes


def _told_mismatch(
    logs: Sequence[RankLog], calls: Sequence[RecordedCall], file: Path, name: str
) -> Shortcoming:
    found = [
        f"rank {log.rank}: {call.kind} of {readable_bytes(call.num_bytes)}"
        f" ({file.name}:{call.line})"
        for log, call in zip(logs, calls, strict=True)
    ]
    return Shortcoming(
        "collective-mismatch",
        "all ranks call the same collectives in the same order, with the same sizes",
        "\n".join(found),
        where=name,
    )


def _refuse_careless(outcome: Outcome, file: Path) -> None:
    """Reject what may have worked only by luck."""
    for name in ["", *outcome.sections]:
        flow = outcome.flow(name)
        mismatch = _size_mismatch(flow, file, name)
        if mismatch is not None:
            raise mismatch
        for log in flow.logs:
            for call in log.calls.values():
                _refuse_careless_call(call, log.rank, file, name)


def _refuse_careless_call(call: Any, rank: int, file: Path, name: str) -> None:
    where = f"rank {rank}, {file.name}:{call.line}"
    if not call.is_done:
        raise Shortcoming(
            "not-waited",
            "wait() is called on every request of isend, irecv and async_op=True",
            f"{where}: wait() was never called on this {call.kind}",
            where=name,
        )
    if call.has_changed:
        raise Shortcoming(
            "changed-in-flight",
            "a tensor does not change between isend and wait()",
            f"{where}: the tensor changed before wait()",
            where=name,
        )
