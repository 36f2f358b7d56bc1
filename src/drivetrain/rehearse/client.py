"""Start the ranks that represent all others, and gather their reports."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.processes import end_child
from drivetrain.parallel.layout import Layout
from drivetrain.rehearse.beside_plan import PlanComparison, compare, predict_in_process
from drivetrain.rehearse.findings import Failure, RankReport, RehearsalFinding, find
from drivetrain.rehearse.worker import Part, rehearse_rank
from drivetrain.rehearse.world import Chosen, choose_ranks

SCRIPT = "DRIVETRAIN_REHEARSE_SCRIPT"
_GRACE_S = 3.0
"""After a rank has failed, the others have this long to report."""
_PLAN_S = 120.0
"""How much longer than the ranks the planner may take."""


@dataclass(frozen=True)
class RehearsalRequest:
    """The user's request for a rehearsal."""

    argv: tuple[str, ...]
    world_size: int
    ranks: str = "sample"
    device_memory_bytes: int | None = None
    devices_per_node: int = 8
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal."""

    asked: RehearsalRequest
    layout: Layout | None
    """None if the script failed before it was known."""
    reports: tuple[RankReport, ...]
    findings: tuple[RehearsalFinding, ...]
    seconds: float
    beside_plan: tuple[PlanComparison, ...] = ()
    """The planner's predictions, figure by figure."""
    plan_problem: str = ""
    """Why there is no prediction; empty if there is one."""

    @property
    def process_bytes(self) -> int:
        """Total memory of all processes."""
        return sum(report.process_bytes for report in self.reports)


def rehearse(asked: RehearsalRequest, say: Callable[[str], None] = lambda _: None) -> Rehearsal:
    """Run the script as each of the representative ranks."""
    _check(asked)
    # only this user can open it: the ranks act on the messages in it
    with TemporaryDirectory(prefix="drivetrain-rehearse-") as folder:
        return _rehearse(asked, f"{folder}/letters", say)


def _rehearse(asked: RehearsalRequest, letters: str, say: Callable[[str], None]) -> Rehearsal:
    began = time.perf_counter()
    os.environ[SCRIPT] = asked.argv[0]
    part = Part(
        asked.argv,
        0,
        asked.world_size,
        asked.devices_per_node,
        asked.device_memory_bytes,
        letters,
        asked.timeout_s,
    )
    ranks: list[_Process] = []
    layout: Layout | None = None
    foresight: _Foresight | None = None
    compared: list[PlanComparison] = []
    problem = ""
    try:
        say("determining the layout")
        ranks.append(_Process.start(part))
        first = ranks[0].receive(asked.timeout_s)
        reports: list[RankReport] = []
        if isinstance(first, Layout):
            layout = first
            chosen = choose_ranks(layout, asked.ranks)
            say(f"{layout}: rehearsing {len(chosen)} of {asked.world_size:,} ranks")
            ranks[0].connection.send(tuple(chosen))
            others = [replace(part, rank=c.rank, chosen=tuple(chosen)) for c in chosen if c.rank]
            ranks += [_Process.start(other) for other in others]
            foresight = _Foresight.start(asked.argv, layout)
            reports = _gather(ranks, chosen, asked.timeout_s, say)
            compared, problem = foresight.compare(reports, layout)
        elif first.failure is not None and first.failure.refused is not None:
            raise ConfigError([first.failure.refused])
        else:
            reports = [first]
    finally:
        for each in ranks:
            each.end()
        if foresight is not None:
            foresight.end()
        del os.environ[SCRIPT]
        _end_server()
    findings = find(reports, asked.device_memory_bytes)
    seconds = time.perf_counter() - began
    return Rehearsal(
        asked, layout, tuple(reports), tuple(findings), seconds, tuple(compared), problem
    )


def _end_server() -> None:
    """Stop the fork server, which has imported this script's modules."""
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # noqa: SLF001 - no other way


def _check(asked: RehearsalRequest) -> None:
    problems = []
    if asked.world_size < 2:
        rule = "a rehearsal needs several ranks"
        problems.append(Problem("--world-size", rule, "use 2 or more", asked.world_size))
    if asked.argv[0] != "-m" and not os.path.isfile(asked.argv[0]):
        problems.append(Problem("SCRIPT", "no such file", "give a script's path", asked.argv[0]))
    if problems:
        raise ConfigError(problems)


@dataclass
class _Process:
    rank: int
    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, part: Part) -> _Process:
        context = multiprocessing.get_context("forkserver")
        # imported once, before the fork: torch, Drivetrain and the script's imports
        context.set_forkserver_preload(["drivetrain.rehearse.ahead"])
        here, there = context.Pipe()
        process = context.Process(target=rehearse_rank, args=(part, there), daemon=True)
        process.start()
        there.close()
        return cls(part.rank, process, here)

    def receive(self, timeout_s: float) -> Layout | RankReport:
        """Return the rank's next message; a process that has exited has failed."""
        if not self.connection.poll(timeout_s):
            return self._failed(f"did not respond for {timeout_s:g} s")
        try:
            word: Layout | RankReport = self.connection.recv()
        except EOFError:
            self.process.join(5)
            return self._failed(f"exited with code {self.process.exitcode}")
        return word

    def _failed(self, message: str) -> RankReport:
        return RankReport(self.rank, "", failure=Failure("RuntimeError", message, None))

    def end(self) -> None:
        end_child(self.process)
        self.connection.close()


@dataclass
class _Foresight:
    """The planner, which runs in parallel with the ranks."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, argv: tuple[str, ...], layout: Layout) -> _Foresight:
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        process = context.Process(
            target=predict_in_process, args=(argv, layout, there), daemon=True
        )
        process.start()
        there.close()
        return cls(process, here)

    def compare(
        self, reports: Sequence[RankReport], layout: Layout
    ) -> tuple[list[PlanComparison], str]:
        """Return the comparisons, or none and the reason."""
        if any(report.failure for report in reports):
            return [], ""
        try:
            said = self.connection.recv() if self.connection.poll(_PLAN_S) else "it took too long"
        except EOFError:
            said = "it exited without a result"
        return ([], said) if isinstance(said, str) else (compare(said, reports, layout), "")

    def end(self) -> None:
        end_child(self.process)
        self.connection.close()


def _gather(
    ranks: Sequence[_Process],
    chosen: Sequence[Chosen],
    timeout_s: float,
    say: Callable[[str], None],
) -> list[RankReport]:
    kinds = {each.rank: each.kind for each in chosen}
    waiting = {each.connection: each for each in ranks}
    reports: list[RankReport] = []
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            report = waiting.pop(connection).receive(1.0)  # type: ignore[call-overload]
            if isinstance(report, RankReport):  # the layout was received before
                reports.append(replace(report, kind=kinds.get(report.rank, report.kind)))
        say(f"{len(reports)} of {len(ranks)} ranks are done")
        if any(report.failure for report in reports):
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    has_failed = any(report.failure for report in reports)
    for late in waiting.values():
        if not has_failed:  # otherwise it waits for the one that failed
            message = f"not finished after {timeout_s:g} s"
            failure = Failure("TimeoutError", message, None)
            reports.append(RankReport(late.rank, kinds.get(late.rank, ""), failure=failure))
    return sorted(reports, key=lambda report: report.rank)
