"""Group: one node's view of the nodes of a run: join, finish together, leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
)

from drivetrain.supervise.failures.reporting import say
from drivetrain.supervise.policy import PREEMPTED_CODE, STALE_CODE
from drivetrain.supervise.rendezvous.handler import FolderRendezvous

_MEMBERSHIP_S = 0.5
_ATTEMPTS_TO_JOIN = 5
_STORE_PATIENCE_S = 3.0
_GOES_ALONE = frozenset({PREEMPTED_CODE, STALE_CODE})


class JoinResult(Enum):
    """The result of an attempt to join."""

    JOINED = "a group was formed"
    FAILED = "it could not be formed"
    CLOSED = "the other nodes have ended the run"


class Others(Enum):
    """The state of the other nodes when this one has finished."""

    FINISHED = "finished too"
    AT_WORK = "not finished yet"
    LOST = "the first node is gone, and the run is not over"


class Group:
    """The nodes of a run; `rendezvous` is torchelastic's join, which fills in `workers`."""

    def __init__(self, workers: WorkerGroup, rendezvous: Callable[[WorkerGroup], None]) -> None:
        self._workers = workers
        self._rendezvous = rendezvous
        self._next_look_s = 0.0
        self._lost_store_s: float | None = None

    @property
    def _handler(self) -> RendezvousHandler:
        return self._workers.spec.rdzv_handler

    def join(self) -> JoinResult:
        """Form a group with the other nodes.

        If a node is lost while the others join, they join again without it. CLOSED means that the
        other nodes have finished or abandoned the run.
        """
        for _ in range(_ATTEMPTS_TO_JOIN):
            try:
                self._rendezvous(self._workers)
            except (RendezvousClosedError, RendezvousGracefulExitError):
                return JoinResult.CLOSED
            except (RendezvousError, DistError, OSError, StopIteration, KeyError) as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                say(f"the nodes could not join ({reason}); retrying")
            else:
                self._next_look_s = time.monotonic() + _MEMBERSHIP_S
                return JoinResult.JOINED
        return JoinResult.FAILED

    @property
    def was_closed_finished(self) -> bool:
        """Whether the nodes that closed the group had finished the run or abandoned it."""
        handler = self._handler
        return isinstance(handler, FolderRendezvous) and handler.has_finished

    def nodes_are_waiting(self) -> bool:
        """True if a node wants to join; checked at most every half second."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _MEMBERSHIP_S
        try:
            return bool(self._handler.num_nodes_waiting() > 0)
        except RendezvousError:  # not reachable just now; checked again soon
            return False

    def finish(self, attempt: int) -> Others:
        """Announce that this node's ranks have finished, and check the others."""
        num_nodes = self._workers.group_world_size or 1
        if num_nodes == 1:
            return Others.FINISHED
        store: Any = self._workers.store
        own = f"finished-{attempt}-{self._workers.group_rank}"
        try:
            if store.add(own, 0) == 0:
                store.add(own, 1)
                store.add("finished", 1)
            return Others.FINISHED if store.add("finished", 0) >= num_nodes else Others.AT_WORK
        except Exception:  # the first node has left: because the run is over, or before its end
            return self._without_store()

    def _without_store(self) -> Others:
        """A node that saw all nodes finish has closed the group; a lost first node has not."""
        now_s = time.monotonic()
        self._lost_store_s = self._lost_store_s or now_s
        with contextlib.suppress(Exception):
            if self._handler.is_closed():
                return Others.FINISHED
        if now_s - self._lost_store_s > _STORE_PATIENCE_S:
            self._lost_store_s = None
            return Others.LOST
        return Others.AT_WORK

    def close(self, exit_code: int) -> None:
        """End the run for all nodes, unless this one was preempted or replaced: it only leaves."""
        if exit_code in _GOES_ALONE:
            return
        handler = self._handler
        with contextlib.suppress(Exception):
            if exit_code == 0 and isinstance(handler, FolderRendezvous):
                handler.close_finished()
            else:
                handler.set_closed()

    def leave(self, exit_code: int) -> None:
        """Leave the rendezvous."""
        handler = self._handler
        with contextlib.suppress(Exception):  # the store may be gone with its node
            if exit_code in _GOES_ALONE and isinstance(handler, FolderRendezvous):
                handler.leave()
            else:
                handler.shutdown()
