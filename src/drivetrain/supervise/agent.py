"""Supervisor: torchelastic's agent for one node, driven by the attempt state machine.

torchelastic forms the group of nodes and assigns the ranks. `machine` and `policy` decide what
happens then; this module turns events into transitions and carries out their actions.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from drivetrain.diagnose.stacks import parse_stacks
from drivetrain.record.session import NODE_SESSION, Phase, run_directory_in
from drivetrain.supervise.attempt import NodeAttempt
from drivetrain.supervise.failures.attempt_report import last_saved_step, write_end
from drivetrain.supervise.failures.failure import RankFailure, was_aborted
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.failures.reporting import (
    kept,
    lost_replica,
    paragraph,
    say,
    stopped,
    with_verdict,
    write_down,
)
from drivetrain.supervise.machine import Action, Machine, MachineState
from drivetrain.supervise.policy import PREEMPTED_CODE, End, EndKind, decide
from drivetrain.supervise.processes.head_start import HeadStart, request
from drivetrain.supervise.processes.node import Node, WarmProcess
from drivetrain.supervise.rendezvous.group import Group, JoinResult, Others
from drivetrain.supervise.requests import Interrupted, Requests
from drivetrain.supervise.settings import Settings
from drivetrain.supervise.stall import Stall, StallWatch, hang_place
from drivetrain.supervise.starting import Logs, Starter

_TICK_S = 0.1
_SPARES_AFTER_S = 5.0
"""Seconds of training before spares start: their imports use a core, and short runs need none."""


class Supervisor(SimpleElasticAgent):
    """The supervisor of one node."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        logs: Logs,
        warm: WarmProcess | None = None,
        head_start: HeadStart | None = None,
    ) -> None:
        super().__init__(spec)
        self._settings = settings
        given = head_start.session if head_start else os.environ.pop(NODE_SESSION, None)
        self._session = Path(given or tempfile.mkdtemp(prefix="drivetrain-"))
        self._owns_session = given is None
        self._head_start = head_start
        self._node = (
            Node(settings.command, self._session, is_python=settings.is_python, warm_process=warm)
            if head_start is None
            else head_start.node
        )
        self._machine = Machine(settings.budgets, time.monotonic, settings.grace_s)
        self._requests = Requests()
        self._group = Group(self._worker_group, self._rendezvous)
        self._starter = Starter(settings, self._node, logs, head_start)
        self._attempt = NodeAttempt(0, self._node, self._worker_group, self._session)
        self._watch = StallWatch(settings.patience)
        self._steps_since: float | None = None
        self._ask_after_s = 0.0
        """Idle seconds after which ranks of a script that reports no steps are asked for stacks."""

    # ── torchelastic's interface ─────────────────────────────────────────────────────────────

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        number = self._attempt.number + 1
        self._attempt = NodeAttempt(number, self._node, worker_group, self._session)
        self._starter.start(self._attempt)
        return {worker.local_rank: worker.pid for worker in self._node.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._node.kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._node.close()
        self._starter.close()
        self._group.leave(self._machine.exit_code)
        if self._owns_session:
            shutil.rmtree(self._session, ignore_errors=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002
        return RunResult(state=WorkerState.HEALTHY)

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002
        with self._requests.listening(self._head_start):
            self._run()
        if self._machine.exit_code:
            return RunResult(state=WorkerState.FAILED)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    @property
    def exit_code(self) -> int:
        """The exit code for the shell, once run() has returned."""
        return self._machine.exit_code

    # ── events ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._requests.pending == signal.SIGUSR1.name:
            # the time limit's signal came before the supervisor listened: there is nothing to save
            self._do(self._machine.asked(self._requests.pending))
            return
        if self._settings.warm_start:
            self._node.keep_warm(self._num_ranks, wait=True)
        elif self._head_start is None:
            self._node.prepare(self._num_ranks)
        self._join()
        while self._machine.state is not MachineState.OVER:
            self._requests.wait([worker.pid for worker in self._node.workers], _TICK_S)
            asked = self._requests.take()
            if asked:
                said_s = self._head_start.request_said_s if self._head_start else None
                if not self._machine.asked_by and said_s is None:
                    say(request(asked))
                self._stop(self._machine.asked(asked, said_s))
            self._stop(self._machine.tick())
            match self._machine.state:
                case MachineState.RUNNING | MachineState.DRAINING:
                    self._look()
                case MachineState.FINISHING:
                    self._finish_together()
                case _:
                    pass

    def _stop(self, actions: Sequence[Action]) -> None:
        """Carry out a request, or what follows when its time is up; report ranks cut short by it.

        The end of ranks that stop by themselves is handled like any other.
        """
        if Action.KILL in actions:
            end = End(EndKind.PREEMPTED, self._attempt.step(), PREEMPTED_CODE)
            where = f" {end.where}" if self._attempt.trains else ""
            detail = f"stopped{where}: {self._machine.why}"
            account = self._attempt.account(end, (), detail, why="", restarts=False)
            self._node.kill()  # before anything is read or written, which may take long
            write_down(self._session, account, {})
            say(f"{detail}; {kept(*self._left())}" if self._attempt.trains else detail)
        self._do(actions)

    def _stopped(self, end: End) -> str:
        """The message when the ranks have ended after a request to stop."""
        if self._attempt.will_train():
            return stopped(end, self._machine.asked_by, *self._left())
        killed = "" if end.kind is EndKind.PREEMPTED else "; all ranks were killed"
        return f"stopped by {self._machine.asked_by}{killed}"

    def _left(self) -> tuple[int | None, Path | None]:
        """Return what is left of the run: the newest checkpoint's step, and where it is."""
        return last_saved_step(self._session), run_directory_in(self._session)

    def _look(self) -> None:
        """Check the ranks and the group of nodes for events."""
        codes = self._node.exit_codes()
        if codes and (self._settings.live or not self._some_are_done(codes)):
            self._on_exits(codes)
            return
        self._attempt.look_at_resources(codes)
        pages = [None if rank in codes else page for rank, page in enumerate(self._attempt.pages())]
        stall = self._watch.observe(pages, time.monotonic())
        if stall is not None:
            self._on_stall(stall)
            return
        if self._settings.is_python and not self._attempt.trains and self._waits_in_vain(codes):
            return
        if any(page is not None and page.phase is Phase.STEPPING for page in pages):
            self._keep_spares()
        if self._machine.state is MachineState.RUNNING and self._group.nodes_are_waiting():
            self._end(End(EndKind.RESIZED, self._attempt.step()))

    def _keep_spares(self) -> None:
        """Keep as many as requested; by default one per rank, once the run has lasted a while."""
        self._steps_since = self._steps_since or time.monotonic()
        if self._settings.spares is not None:
            self._node.keep_warm(self._settings.spares)
        elif time.monotonic() - self._steps_since >= _SPARES_AFTER_S:
            self._node.keep_warm(self._num_ranks)

    @property
    def _num_ranks(self) -> int:
        return int(self._worker_group.spec.local_world_size)

    def _some_are_done(self, codes: Mapping[int, int]) -> bool:
        """True if some ranks have succeeded while others, which may wait for them, still run."""
        return set(codes.values()) == {0} and len(codes) < len(self._node.workers)

    def _on_exits(self, codes: Mapping[int, int]) -> None:
        is_live = self._settings.live and self._machine.state is MachineState.RUNNING
        if is_live and self._replace_lost(codes):
            return
        # once one live replica has finished the run, none is restarted
        if set(codes.values()) == {0} or (is_live and 0 in codes.values()):
            if len(codes) == len(self._node.workers):
                self._end(End(EndKind.FINISHED, self._attempt.step(), 0))
            return
        codes = self._attempt.wait_for_the_cause(codes)
        stops_well = set(codes.values()) <= {0, PREEMPTED_CODE}
        is_partial = len(codes) < len(self._node.workers)
        if self._machine.state is MachineState.DRAINING and is_partial and stops_well:
            return  # the others are still saving
        failures = self._attempt.failures(codes)
        self._end(self._attempt.classify(failures), failures)

    def _replace_lost(self, codes: Mapping[int, int]) -> bool:
        """Restart lost live replicas individually, until one has finished the run."""
        if 0 in codes.values():
            return False
        for rank, code in codes.items():
            failures = self._attempt.failures({rank: code})
            end = self._attempt.classify(failures)
            decision = decide(end, self._machine.history, self._settings.budgets)
            if not decision.restart or end.kind is EndKind.PREEMPTED:
                return False
            self._machine.history.append(end)
            account = self._attempt.account(end, failures, why=self._machine.why, restarts=True)
            write_end(self._session, account, {})
            say(lost_replica(end, failures[0], account.host))
            self._node.replace(rank)
        return True

    def _on_stall(self, stall: Stall) -> None:
        self._watch.be_more_lenient()
        if self._settings.live and self._machine.state is MachineState.RUNNING:
            self._node.workers[stall.local_rank].kill()  # its exit is handled in the next iteration
            return
        rank, is_running = self._attempt.global_rank(stall.local_rank), not self._machine.asked_by
        dumps = self._attempt.collect_dumps(asking=is_running)
        place = hang_place({rank: parse_stacks(dump.stacks) for rank, dump in dumps.items()})
        end = End(EndKind.STALLED, self._attempt.step(), fault=place)
        self._end(end, detail=f"rank {rank}: {stall}", dumps=dumps)

    def _waits_in_vain(self, codes: Mapping[int, int]) -> bool:
        """For a script that reports no steps: detect ranks that only wait for each other."""
        patience, idle_s = self._settings.patience, self._attempt.idle_s(codes)
        if idle_s <= patience.stepping_s:
            self._ask_after_s = 0.0
            return False
        if idle_s < self._ask_after_s:
            return False
        self._ask_after_s = idle_s + patience.stepping_s
        if not self._attempt.waits_for_itself(idle_s, patience):
            return False
        detail = f"no rank has computed anything for {idle_s:.1f} s"
        self._end(End(EndKind.STALLED, 0, trains=False), detail=detail)
        return True

    def _finish_together(self) -> None:
        """Wait until every node's ranks have finished; rejoin if another node failed."""
        self._node.kill()
        others = self._group.finish(self._attempt.number)
        if others is Others.FINISHED:
            self._do(self._machine.others_ended())
        elif others is Others.LOST or self._group.nodes_are_waiting():
            self._do(self._machine.rejoin())

    # ── transitions ──────────────────────────────────────────────────────────────────────────

    def _end(
        self,
        end: End,
        failures: Sequence[RankFailure] = (),
        detail: str = "",
        dumps: Mapping[int, RankDump] | None = None,
    ) -> None:
        """End this node's attempt: decide what to do, report it, record it, do it.

        `dumps` are those of the ranks, if they have already been collected.
        """
        actions = self._machine.ended(end)
        if dumps is None:
            asking = Action.DUMP_STACKS in actions or was_aborted(failures)
            dumps = self._attempt.collect_dumps(asking=asking)
        why, restarts = self._machine.why, Action.JOIN in actions
        account = self._attempt.account(end, failures, detail, why=why, restarts=restarts)
        finding = write_down(self._session, account, dumps)
        sys.stdout.flush()
        if self._machine.asked_by:
            say(self._stopped(end))
        elif end.kind is not EndKind.FINISHED:
            said = paragraph(account)
            say(with_verdict(said, finding, is_written_down=end.trains))
        self._do(actions)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Action.KILL:
                    self._node.kill()
                case Action.ASK:
                    self._node.ask_to_stop(self._stop_signal())
                case Action.JOIN:
                    self._join()
                case Action.START:
                    self._worker_group.state = WorkerState.HEALTHY
                    self._start_workers(self._worker_group)
                case Action.LEAVE:
                    self._group.close(self._machine.exit_code)
                case Action.DUMP_STACKS:
                    pass  # already done, before the end was recorded

    def _join(self) -> None:
        try:
            # torch's rendezvous does not return on a signal
            result = self._requests.interrupting(self._group.join)
        except Interrupted:  # the loop handles it like any other request
            return
        match result:
            case JoinResult.JOINED:
                self._do(self._machine.joined())
            case JoinResult.FAILED:
                self._machine.could_not_join()
                say("rendezvous failed; exiting so that this node can be restarted")
            case JoinResult.CLOSED:
                has_finished = self._group.was_closed_finished
                self._machine.came_too_late(has_finished=has_finished)
                how = "finished" if has_finished else "ended"
                say(f"the other nodes have {how} the run; stopping")

    def _stop_signal(self) -> signal.Signals:
        """A Trainer saves on SIGTERM; another script may handle only Ctrl-C (SIGINT)."""
        is_interrupt = self._machine.asked_by == signal.SIGINT.name
        return signal.SIGINT if is_interrupt and not self._attempt.trains else signal.SIGTERM
