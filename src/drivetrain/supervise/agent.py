"""Supervisor: torchelastic's agent for one node, driven by the attempt state machine.

torchelastic forms the group of nodes and numbers the ranks. What happens then is decided by
`machine` and `policy`; here is only the doing: processes, signals, clocks and files.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.run import explain_attempt
from drivetrain.record.session import (
    COMMAND_S,
    LAUNCHED_S,
    NODE_SESSION,
    TRAINS,
    Phase,
    Progress,
    read_progress,
)
from drivetrain.supervise.account import Account, write_end
from drivetrain.supervise.failure import RankFailure, root_cause
from drivetrain.supervise.lighthouse import ADDRESS, LIVE, Lighthouse
from drivetrain.supervise.logs import Logs
from drivetrain.supervise.machine import Action, Machine, State
from drivetrain.supervise.meeting.rendezvous import FolderRendezvous
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE, Budgets, End, Kind, decide
from drivetrain.supervise.processes.environment import rank_environment
from drivetrain.supervise.processes.head_start import ASKS, HeadStart
from drivetrain.supervise.processes.node import Node, WarmProcess
from drivetrain.supervise.report import lost_replica, paragraph, stopped, with_verdict
from drivetrain.supervise.resources import ResourceWatch
from drivetrain.supervise.stall import Patience, Stall, StallWatch
from drivetrain.supervise.testimony import Testimony

_TICK_S = 0.1
_MEMBERSHIP_S = 0.5
_MEETINGS = 5
_STORE_PATIENCE_S = 3.0
_LEAVING_S = 2.0


@dataclass(frozen=True)
class Settings:
    """How this node supervises."""

    command: tuple[str, ...]
    """The script and its arguments."""
    is_python: bool = True
    budgets: Budgets = field(default_factory=Budgets)
    patience: Patience = field(default_factory=Patience)
    grace_s: float = 30.0
    spares: int | None = None
    """Warm processes kept ready; None: one per worker."""
    live: bool = False
    """Whether ranks are replicas that are replaced one by one, while the others go on."""
    warm_start: bool = False
    """Import once and fork the first ranks too."""


def _was_aborted(failures: Sequence[RankFailure]) -> bool:
    """By gloo, most likely, over calls that did not match; then the others know with what."""
    return bool(failures) and root_cause(failures).killed_by == signal.SIGABRT.name


class _Asked(Exception):
    """A signal came while the nodes were meeting."""


class Supervisor(SimpleElasticAgent):
    """One per node."""

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
        self._node = Node(
            settings.command, self._session, is_python=settings.is_python, warm_process=warm
        )
        if head_start is not None:
            self._node = head_start.node
        self._machine = Machine(settings.budgets, time.monotonic, settings.grace_s)
        self._logs = logs
        self._watch = StallWatch(settings.patience)
        self._resources = ResourceWatch()
        self._lighthouse: Lighthouse | None = None
        self._num_started = 0
        self._asked: str = ""
        self._is_meeting = False
        self._lost_store_s: float | None = None
        self._host = socket.gethostname()
        self._command_s = os.environ.get(COMMAND_S) or str(time.time())
        self._next_membership_s = 0.0

    # ── torchelastic's interface ─────────────────────────────────────────────────────────────

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._num_started += 1
        self._resources = ResourceWatch()
        environments = [
            {
                **rank_environment(worker_group, w.local_rank, self._round),
                COMMAND_S: self._command_s,
                LAUNCHED_S: str(time.time()),
                "TORCHELASTIC_MAX_RESTARTS": str(self._settings.budgets.failures),
                "TORCHELASTIC_ERROR_FILE": str(self._error_file(w.local_rank)),
                **self._logs.environment(w.global_rank),
            }
            for w in worker_group.workers
        ]
        if self._settings.live:
            address = self._lighthouse_address(worker_group)
            environments = [{**env, ADDRESS: address, LIVE: "1"} for env in environments]
        head_start, self._head_start = self._head_start, None
        if head_start is None or not head_start.has_told(environments):
            self._node.kill()
            self._node.start(environments)
        self._logs.follow([worker.global_rank for worker in worker_group.workers])
        return {worker.local_rank: worker.pid for worker in self._node.workers}

    def _lighthouse_address(self, group: WorkerGroup) -> str:
        """The first node keeps it; the others ask the round's store."""
        store: Any = self._store
        if group.group_rank == 0:
            self._lighthouse = self._lighthouse or Lighthouse(str(group.master_addr))
            store.set("lighthouse", self._lighthouse.address)
        return str(store.get("lighthouse").decode())

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._node.kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._node.close()
        self._logs.close()
        if self._lighthouse is not None:
            self._lighthouse.close()
        handler = self._worker_group.spec.rdzv_handler
        with contextlib.suppress(Exception):  # the store may be gone with its node
            if self._leaves_alone and isinstance(handler, FolderRendezvous):
                handler.leave()
            else:
                handler.shutdown()
        if self._owns_session:
            shutil.rmtree(self._session, ignore_errors=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002
        return RunResult(state=WorkerState.HEALTHY)

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002
        with self._listening():
            self._run()
        if self._machine.exit_code:
            return RunResult(state=WorkerState.FAILED)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    @property
    def exit_code(self) -> int:
        """For the shell, once run() has returned."""
        return self._machine.exit_code

    # ── the run ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._asked == signal.SIGUSR1.name:
            # its time was up before it could listen: nothing to save, everything to do
            self._do(self._machine.asked(self._asked))
            return
        if self._settings.warm_start:
            self._node.keep_warm(self._worker_group.spec.local_world_size, wait=True)
        elif self._head_start is None:
            self._node.prepare(self._worker_group.spec.local_world_size)
        self._do([Action.MEET])
        while self._machine.state is not State.OVER:
            self._wait(_TICK_S)
            if self._asked:
                asked, self._asked = self._asked, ""
                self._say(f"{asked} received: the ranks are asked to save and stop")
                self._do(self._machine.asked(asked))
            self._do(self._machine.tick())
            match self._machine.state:
                case State.RUNNING | State.DRAINING:
                    self._look()
                case State.FINISHING:
                    self._finish_together()
                case _:
                    pass

    def _look(self) -> None:
        """Has anything happened to the ranks, or to the group of nodes?"""
        codes = self._node.exit_codes()
        if codes and (self._settings.live or not self._some_are_done(codes)):
            self._on_exits(codes)
            return
        living = [(w.local_rank, w.pid) for w in self._node.workers if w.local_rank not in codes]
        self._resources.look(living, time.monotonic())
        pages = [None if rank in codes else page for rank, page in enumerate(self._pages())]
        stall = self._watch.observe(pages, time.monotonic())
        if stall is not None:
            self._on_stall(stall)
            return
        if any(page is not None and page.phase is Phase.STEPPING for page in pages):
            self._node.keep_warm(self._num_spares)
        if self._machine.state is State.RUNNING and self._nodes_are_waiting():
            self._end(End(Kind.RESIZED, self._step()))

    def _some_are_done(self, codes: Mapping[int, int]) -> bool:
        """Ranks that ended well, while others go on; those may yet wait for them in vain."""
        return set(codes.values()) == {0} and len(codes) < len(self._node.workers)

    def _replace_lost(self, codes: Mapping[int, int]) -> bool:
        """Live replicas are started again each by itself, until one has finished the run."""
        lost = {rank: code for rank, code in codes.items() if code != 0}
        if not lost or len(lost) < len(codes):
            return False
        for rank, code in lost.items():
            failures = [self._failure(rank, code)]
            end = self._classify(failures)
            decision = decide(end, self._machine.history, self._settings.budgets)
            if not decision.restart or end.kind is Kind.PREEMPTED:
                return False
            self._machine.history.append(end)
            self._write_end(end, failures, "", {}, restarts=True)
            self._say(lost_replica(end, failures[0], self._host))
            self._node.replace(rank)
        return True

    def _on_exits(self, codes: Mapping[int, int]) -> None:
        if self._settings.live and self._machine.state is State.RUNNING:
            if self._replace_lost(codes):
                return
            if 0 in codes.values():  # one has finished the run: nobody is started again
                if len(codes) == len(self._node.workers):
                    self._end(End(Kind.FINISHED, self._step(), 0))
                return
        if all(code == 0 for code in codes.values()):
            if len(codes) == len(self._node.workers):
                self._end(End(Kind.FINISHED, self._step(), 0))
            return
        # a failing rank takes others down with it; give them a moment to say why
        codes = self._wait_for_more(codes, 0.1)
        failures = [self._failure(rank, code) for rank, code in codes.items() if code != 0]
        if root_cause(failures).is_collateral and self._worker_group.group_world_size in (None, 1):
            # somebody here has left, and is only just ending: who it was is the verdict
            codes = self._wait_for_more(codes, _LEAVING_S)
            failures = [self._failure(rank, code) for rank, code in codes.items() if code != 0]
        stops_well = all(code in (0, PREEMPTED_CODE) for code in codes.values())
        is_partial = len(codes) < len(self._node.workers)
        if self._machine.state is State.DRAINING and is_partial and stops_well:
            return  # the others are still saving
        self._end(self._classify(failures), failures)

    def _wait_for_more(self, codes: Mapping[int, int], patience_s: float) -> Mapping[int, int]:
        """Exit codes after a moment, in which others may have ended too."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and len(codes) < len(self._node.workers):
            time.sleep(0.01)
            codes = self._node.exit_codes()
        return codes

    def _classify(self, failures: list[RankFailure]) -> End:
        pages = self._pages()
        trains = (self._session / TRAINS).exists()
        cause = root_cause(failures)
        step = self._step()
        code = cause.process_exit_code
        if all(failure.exit_code == PREEMPTED_CODE for failure in failures):
            kind = Kind.PREEMPTED
        elif any(failure.exit_code == STALE_CODE for failure in failures):
            kind, code = Kind.STALE, STALE_CODE
        elif cause.is_collateral and self._worker_group.group_world_size not in (None, 1):
            kind = Kind.PEER
        elif not any(page is not None and page.phase is not Phase.STARTING for page in pages):
            kind = Kind.START_UP
        else:
            kind = Kind.FAILED
        return End(kind, step, code, trains, by_signal=cause.killed_by is not None)

    def _on_stall(self, stall: Stall) -> None:
        self._watch.leniency *= 2
        if self._settings.live and self._machine.state is State.RUNNING:
            self._node.workers[stall.local_rank].kill()  # its end is seen at the next look
            return
        rank = self._worker_group.workers[stall.local_rank].global_rank
        self._end(End(Kind.STALLED, self._step()), detail=f"rank {rank}: {stall}")

    def _end(self, end: End, failures: Sequence[RankFailure] = (), detail: str = "") -> None:
        """An attempt is over for this node: decide, say, write down, do."""
        actions = self._machine.ended(end)
        told = self._node.left_behind()
        if Action.DUMP_STACKS in actions or _was_aborted(failures):
            told |= self._node.hear()
        written = self._write_end(end, failures, detail, told, restarts=Action.MEET in actions)
        finding = None if written is None else self._explain(*written)
        sys.stdout.flush()
        if self._machine.asked_by:
            self._say(stopped(end, self._machine.asked_by))
        elif end.kind is not Kind.FINISHED:
            restarts = Action.MEET in actions
            why = self._machine.why
            text = paragraph(end, failures, self._host, detail, restarts=restarts, why=why)
            self._say(with_verdict(text, finding))
        self._do([action for action in actions if action is not Action.DUMP_STACKS])

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Action.KILL:
                    self._node.kill()
                case Action.ASK:
                    self._node.ask_to_stop(self._stop_signal())
                case Action.MEET:
                    self._meet()
                case Action.START:
                    self._worker_group.state = WorkerState.HEALTHY
                    self._start_workers(self._worker_group)
                case Action.LEAVE:
                    self._close_group()
                case Action.DUMP_STACKS:
                    pass

    def _meet(self) -> None:
        """Form a group with the other nodes; those that gave up have closed it."""
        try:
            has_met = self._try_to_meet()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            self._come_too_late()
            return
        except _Asked:  # handled as any other request, by the loop
            return
        if not has_met:
            self._machine.state, self._machine.exit_code = State.OVER, PREEMPTED_CODE
            self._say("the nodes could not meet; leaving, so that this one can be started again")
            return
        self._next_membership_s = time.monotonic() + _MEMBERSHIP_S
        self._do(self._machine.met())

    def _come_too_late(self) -> None:
        """The others have closed the group: because the run is done, or because they gave up."""
        handler = self._worker_group.spec.rdzv_handler
        is_done = isinstance(handler, FolderRendezvous) and handler.has_finished
        self._machine.state = State.OVER
        self._machine.exit_code = 0 if is_done else self._machine.exit_code or 1
        how = "finished" if is_done else "ended"
        self._say(f"the other nodes have {how} the run; stopping")

    def _try_to_meet(self) -> bool:
        """A node may be lost while the others meet: then they meet again, without it."""
        for _ in range(_MEETINGS):
            self._is_meeting = True
            try:
                self._rendezvous(self._worker_group)
                return True
            except (RendezvousClosedError, RendezvousGracefulExitError):
                raise
            except (RendezvousError, DistError, OSError, StopIteration, KeyError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                self._say(f"the nodes could not meet ({reason}); trying again")
            finally:
                self._is_meeting = False
        return False

    def _finish_together(self) -> None:
        """Wait until every node's ranks have finished, or go back to help those that failed."""
        self._node.kill()
        nodes = self._worker_group.group_world_size or 1
        has_ended = nodes == 1 or self._others_have_finished(nodes)
        if self._machine.state is not State.FINISHING:
            return
        if has_ended:
            self._do(self._machine.others_ended())
        elif self._nodes_are_waiting():
            self._do(self._machine.rejoin())

    def _others_have_finished(self, nodes: int) -> bool:
        store: Any = self._store
        key = f"finished-{self._num_started}"
        try:
            if store.add(f"{key}-{self._worker_group.group_rank}", 0) == 0:
                store.add(f"{key}-{self._worker_group.group_rank}", 1)
                store.add("finished", 1)
            return int(store.add("finished", 0)) >= nodes
        except Exception:  # the first node has gone: with the end of the run, or before it
            return self._run_is_closed()

    def _run_is_closed(self) -> bool:
        """Who saw all nodes finish has closed the group; a first node that is lost has not."""
        now_s = time.monotonic()
        self._lost_store_s = self._lost_store_s or now_s
        with contextlib.suppress(Exception):
            if self._worker_group.spec.rdzv_handler.is_closed():
                return True
        if now_s - self._lost_store_s > _STORE_PATIENCE_S:
            self._lost_store_s = None
            self._do(self._machine.rejoin())
        return False

    def _close_group(self) -> None:
        """A node that stops for good ends the run for all; one that was preempted only leaves."""
        if self._leaves_alone:
            return
        handler = self._worker_group.spec.rdzv_handler
        with contextlib.suppress(Exception):
            if self._machine.exit_code == 0 and isinstance(handler, FolderRendezvous):
                handler.close_finished()
            else:
                handler.set_closed()

    @property
    def _leaves_alone(self) -> bool:
        return self._machine.exit_code in (PREEMPTED_CODE, STALE_CODE)

    def _stop_signal(self) -> signal.Signals:
        """A Trainer saves on SIGTERM; another script may wait for its Ctrl-C."""
        is_interrupt = self._machine.asked_by == signal.SIGINT.name
        trains = (self._session / TRAINS).exists()
        return signal.SIGINT if is_interrupt and not trains else signal.SIGTERM

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def _pages(self) -> list[Progress | None]:
        return [read_progress(self._session, w.local_rank) for w in self._node.workers]

    def _step(self) -> int:
        return max((page.step for page in self._pages() if page is not None), default=0)

    def _nodes_are_waiting(self) -> bool:
        now_s = time.monotonic()
        spec = self._worker_group.spec
        if now_s < self._next_membership_s:
            return False
        self._next_membership_s = now_s + _MEMBERSHIP_S
        try:
            return bool(spec.rdzv_handler.num_nodes_waiting() > 0)
        except RendezvousError:  # not to be reached just now; asked again in a moment
            return False

    @property
    def _num_spares(self) -> int:
        spares = self._settings.spares
        return self._worker_group.spec.local_world_size if spares is None else spares

    def _failure(self, local_rank: int, exit_code: int) -> RankFailure:
        """What is known of a rank that has ended; without an error file it said nothing."""
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self._error_file(local_rank).read_text())["message"]["extraInfo"]
        return RankFailure(
            rank=self._worker_group.workers[local_rank].global_rank,
            pid=self._node.workers[local_rank].pid,
            exit_code=exit_code,
            error=str(message.get("py_callstack", "")),
            at_s=float(message.get("at_s", time.time())),
        )

    @property
    def _round(self) -> int:
        """The same number on every node of a group, where the rendezvous has one."""
        return int(getattr(self._worker_group.spec.rdzv_handler, "round", self._num_started - 1))

    def _error_file(self, local_rank: int) -> Path:
        return self._session / "errors" / f"{self._num_started}-{local_rank}.json"

    # ── saying and writing down ──────────────────────────────────────────────────────────────

    def _say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def _write_end(
        self,
        end: End,
        failures: Sequence[RankFailure],
        detail: str,
        told: Mapping[int, Testimony],
        *,
        restarts: bool,
    ) -> tuple[Path, int] | None:
        """For whoever reads the run directory later; never a reason to fail."""
        ranks = {w.local_rank: w.global_rank for w in self._worker_group.workers}
        codes = self._node.exit_codes()
        account = Account(
            end,
            failures,
            self._host,
            detail,
            self._machine.why,
            restarts,
            exits={ranks[local]: code for local, code in codes.items()},
            ranks=tuple(ranks.values()),
            resources={ranks[local]: facts for local, facts in self._resources.facts().items()},
        )
        return write_end(self._session, account, {ranks[local]: t for local, t in told.items()})

    def _explain(self, run_dir: Path, attempt: int) -> Finding | None:
        """The verdict on what was just written down; a mistake in it must not end a run."""
        try:
            return explain_attempt(run_dir, attempt)
        except Exception as error:
            self._say(f"no verdict: {type(error).__name__}: {error}")
            return None

    # ── signals and time ─────────────────────────────────────────────────────────────────────

    def _wait(self, seconds: float) -> None:
        """Until a worker ends, a signal comes, or time is up."""
        with selectors.DefaultSelector() as selector:
            descriptors = []
            try:
                for worker in self._node.workers:
                    with contextlib.suppress(ProcessLookupError):
                        descriptors.append(os.pidfd_open(worker.pid))
                        selector.register(descriptors[-1], selectors.EVENT_READ)
                selector.register(self._wakeup, selectors.EVENT_READ)
                selector.select(seconds)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 64)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self._wakeup, writing = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writing, False)
        before = {number: signal.signal(number, self._note) for number in ASKS}
        old = signal.set_wakeup_fd(writing)
        if self._head_start is not None:
            self._asked = self._asked or self._head_start.asked
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wakeup)
            os.close(writing)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked = signal.Signals(number).name
        if self._is_meeting:  # torch's rendezvous would go on waiting
            raise _Asked
