"""Attempt: the ranks of this node from one start to the next, and what is known about them."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from drivetrain.diagnose.stacks import parse_stacks
from drivetrain.record.session import TRAINS, RankProgress, read_progress
from drivetrain.supervise.failures.attempt_report import (
    AttemptReport,
    last_saved_step,
    whole_traceback,
)
from drivetrain.supervise.failures.failure import RankFailure, classify, last_step, root_cause
from drivetrain.supervise.failures.rank_dump import RankDump
from drivetrain.supervise.policy import End
from drivetrain.supervise.processes.node import Node
from drivetrain.supervise.resources import ResourceWatch, processor_s
from drivetrain.supervise.script import imports_drivetrain
from drivetrain.supervise.stall import IdleWatch, Patience, is_deadlock

_SAYING_WHY_S = 0.1
_LEAVING_S = 2.0


class NodeAttempt:
    """The ranks of `group` that run in the processes of `node`."""

    def __init__(self, number: int, node: Node, group: WorkerGroup, session: Path) -> None:
        self.number = number
        """Counts the starts on this node, from 1."""
        self.group = group
        self._node = node
        self._session = session
        self._resources = ResourceWatch()
        self._idle = IdleWatch()
        self._host = socket.gethostname()

    @property
    def round(self) -> int:
        """The rendezvous round, the same on every node; without one, counted on this node."""
        return int(getattr(self.group.spec.rdzv_handler, "round", self.number - 1))

    @property
    def has_peers(self) -> bool:
        """Whether the group has other nodes."""
        return self.group.group_world_size not in (None, 1)

    @property
    def trains(self) -> bool:
        """Whether the script trains with Drivetrain."""
        return (self._session / TRAINS).exists()

    def will_train(self) -> bool:
        """True if the script trains, or imports Drivetrain and so may only not have begun to."""
        return self.trains or imports_drivetrain(self._node.command)

    def pages(self) -> list[RankProgress | None]:
        """Return the progress that each rank last recorded."""
        return [read_progress(self._session, w.local_rank) for w in self._node.workers]

    def step(self) -> int:
        """Return the last finished step."""
        return last_step(self.pages())

    def global_rank(self, local_rank: int) -> int:
        return int(self.group.workers[local_rank].global_rank)

    def error_file(self, local_rank: int) -> Path:
        """Return the file to which a rank writes its traceback."""
        return self._session / "errors" / f"{self.number}-{local_rank}.json"

    def look_at_resources(self, codes: Mapping[int, int]) -> None:
        """Sample the live ranks: all but those that have ended with `codes`."""
        living = [(w.local_rank, w.pid) for w in self._node.workers if w.local_rank not in codes]
        self._resources.look(living, time.monotonic())

    def idle_s(self, codes: Mapping[int, int]) -> float:
        """Return for how long no live rank has computed anything."""
        living = [w.pid for w in self._node.workers if w.local_rank not in codes]
        used_s = {pid: seconds for pid in living if (seconds := processor_s(pid)) is not None}
        return self._idle.observe(used_s, time.monotonic())

    def waits_for_itself(self, idle_s: float, patience: Patience) -> bool:
        """True if ranks idle for `idle_s` are deadlocked; asks them for their stacks."""
        told = self.collect_dumps(asking=True)
        stacks = {rank: parse_stacks(dump.stacks) for rank, dump in told.items()}
        return is_deadlock(stacks, idle_s, patience, has_peers=self.has_peers)

    def failures(self, codes: Mapping[int, int]) -> list[RankFailure]:
        """Return the failures among the ranks that have ended with `codes`."""
        return [self._failure(rank, code) for rank, code in codes.items() if code != 0]

    def wait_for_the_cause(self, codes: Mapping[int, int]) -> Mapping[int, int]:
        """A failing rank takes others down with it: wait briefly for the one that failed first."""
        codes = self._wait_for_more(codes, _SAYING_WHY_S)
        if root_cause(self.failures(codes)).is_collateral and not self.has_peers:
            # these ranks only lost a peer on this node, which is still exiting: it is the cause
            codes = self._wait_for_more(codes, _LEAVING_S)
        return codes

    def classify(self, failures: Sequence[RankFailure]) -> End:
        """Classify the end; for ranks killed before they could report that they train, too."""
        was_killed = root_cause(failures).was_killed_from_outside
        trains = self.will_train() if was_killed else self.trains
        return classify(failures, self.pages(), trains=trains, has_peers=self.has_peers)

    def collect_dumps(self, *, asking: bool) -> dict[int, RankDump]:
        """The dumps of failed ranks, by global rank; `asking` adds those of the live ranks."""
        told = self._node.left_behind()
        if asking:
            told |= self._node.collect_dumps()
        return {self.global_rank(local): dump for local, dump in told.items()}

    def account(
        self,
        end: End,
        failures: Sequence[RankFailure],
        detail: str = "",
        *,
        why: str,
        restarts: bool,
    ) -> AttemptReport:
        """Collect all that is known about the attempt's end."""
        codes, resources = self._node.exit_codes(), self._resources.facts()
        return AttemptReport(
            end,
            failures,
            self._host,
            detail,
            why,
            restarts,
            exits={self.global_rank(local): code for local, code in codes.items()},
            ranks=tuple(worker.global_rank for worker in self.group.workers),
            resources={self.global_rank(local): facts for local, facts in resources.items()},
            whole=whole_traceback(self._session, failures),
            has_begun=self.trains,
            is_unsaved=restarts and last_saved_step(self._session) == 0,
        )

    def _wait_for_more(self, codes: Mapping[int, int], patience_s: float) -> Mapping[int, int]:
        """Wait up to `patience_s` for the other ranks to end; return the exit codes."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and len(codes) < len(self._node.workers):
            time.sleep(0.01)
            codes = self._node.exit_codes()
        return codes

    def _failure(self, local_rank: int, exit_code: int) -> RankFailure:
        """The failure of a rank that has ended; without an error file, `error` is empty."""
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self.error_file(local_rank).read_text())["message"]["extraInfo"]
        return RankFailure(
            rank=self.global_rank(local_rank),
            pid=self._node.workers[local_rank].pid,
            exit_code=exit_code,
            error=str(message.get("py_callstack", "")),
            at_s=float(message.get("at_s", time.time())),
        )
